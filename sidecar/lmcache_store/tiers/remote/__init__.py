"""The remote tier: checksummed objects in Redis or Valkey."""
