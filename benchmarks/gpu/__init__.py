"""Measurements that need a GPU: bandwidth of copies, their effect on kernels, cost of pinning."""
