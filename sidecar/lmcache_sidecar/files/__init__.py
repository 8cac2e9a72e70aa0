"""Files and directories that the operator mounts, and that the sidecar re-reads while it runs."""
