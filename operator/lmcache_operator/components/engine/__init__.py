"""The engine pods of a cluster, each with a sidecar, and the objects that belong to them.

``engine`` is the component, ``pod`` and ``template`` render the pod, ``gpus`` its GPUs, and ``status`` merges
the reports of sidecars. ``kinds`` has what differs between vLLM and SGLang, and ``features`` has a module for
each feature, such as the disk tier.

The path of a field, ``tiers.memory.size``: ``pod`` derives the volume, the memory request and the sidecar's
``--memory-size``. The sidecar's ``config`` passes it to the arena. If autoscaling chose another size, new
pods start with that one, and ``pods.resize`` plans the steps of running pods.
"""
