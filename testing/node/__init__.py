"""A Kubernetes node that runs pods, on this machine: a kubelet and containerd in namespaces of their own."""
