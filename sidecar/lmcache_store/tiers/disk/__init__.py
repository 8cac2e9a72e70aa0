"""The disk tier: one directory of checksummed files."""
