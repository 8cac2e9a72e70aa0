"""A driver of simulated GPUs for dynamic resource allocation (DRA), on the node of a real kubelet."""
