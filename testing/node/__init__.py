"""A Kubernetes node on this machine that runs pods: a kubelet and containerd in their own namespaces."""
