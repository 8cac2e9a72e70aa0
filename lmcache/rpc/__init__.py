"""Engine to sidecar: the messages (``kvcache.proto``), the generated code and a typed client."""
