"""The pods of a cluster: their state, and the steps that are due for them. Pure.

``pods`` says which pods are missing or not ready, ``nodes`` which are on lost nodes, ``differences`` which
objects to apply and delete, and ``resize`` how a running pod's memory tier changes its size.
"""
