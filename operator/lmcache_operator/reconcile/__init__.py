"""The reconcile loop of one cluster: observe, plan, apply, probe, report.

``reconciler`` runs ``observe``, ``plan``, ``apply``, ``probe`` and ``status`` in this order. ``absent``
remembers objects that need no read, ``contest`` notices a client that undoes writes, ``references`` wakes
clusters that refer to each other, and ``measures`` makes metrics of a status.
"""
