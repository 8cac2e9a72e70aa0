"""Explains lookups: where each token of a prompt came from, and why the rest was computed."""
