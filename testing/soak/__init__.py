"""Traffic on one sidecar with all its tiers, while processes, files and servers fail (``make soak``)."""
