"""The reconcile loop of one cluster: observe, plan, apply, probe, report."""
