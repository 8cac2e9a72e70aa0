"""The Kubernetes binaries, built and cached, and the schemas that come from them."""
