"""The pods that only compute prompts for a cluster."""
