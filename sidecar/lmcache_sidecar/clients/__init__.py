"""Clients of the sidecar: who is attached, what they may get wrong, and how their death is proven."""
