"""The pages that the sidecar serves over HTTP, and what they show."""
