"""The only part that talks to the API server."""
