"""The components of a cluster, such as its engine pods: ``base`` is the contract, ``registry`` the list."""
