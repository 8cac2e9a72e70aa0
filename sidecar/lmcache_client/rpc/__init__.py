"""Protocol between engine and sidecar: messages (``kvcache.proto``), generated code and a typed client."""
