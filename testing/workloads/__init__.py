"""Requests as LLM services see them, tiers that serve them exactly, and autoscalers in a loop with both."""
