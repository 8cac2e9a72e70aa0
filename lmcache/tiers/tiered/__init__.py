"""The tiers together: write-through, promotion, and load or recompute."""
