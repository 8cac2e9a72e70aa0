"""Commands for people: they ask a running sidecar and print its answers."""
