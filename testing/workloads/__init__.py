"""Requests of LLM services, exact tiers that serve them, and autoscalers in a closed loop with both."""
