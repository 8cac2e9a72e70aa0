"""The client for the API server. No other package calls it."""
