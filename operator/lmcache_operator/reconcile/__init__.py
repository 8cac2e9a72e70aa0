"""The loop over one cluster: observe, plan, apply, report."""
