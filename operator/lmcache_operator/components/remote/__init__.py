"""The servers of a managed remote tier, and the list by which sidecars find them."""
