"""The router in front of the engines."""
