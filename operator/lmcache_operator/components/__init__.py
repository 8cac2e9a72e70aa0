"""The components of a cluster, such as its engine pods: objects and status of each. Pure.

``registry`` is the list, and ``contract.base`` is what each implements. ``figures`` (numbers for the
status) and ``images`` are parts that several components share.
"""
