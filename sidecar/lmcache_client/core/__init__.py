"""Engine-neutral parts of all connectors: jobs, lookups, transfers, copiers. Imports no engine."""
