"""All tiers together: write-through, promotion, and the decision to load or recompute."""
