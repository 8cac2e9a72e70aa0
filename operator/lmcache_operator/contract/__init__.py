"""The contract between the reconciler and components: objects, answers of sidecars, and conditions.

``base`` is the contract of a component. ``conditions`` lists problems, Events and all reasons; each reason
of a problem has a page in ``docs/runbooks``.
"""
