"""What every engine connector is made of: jobs, lookups, transfers, copiers. No engine is imported here."""
