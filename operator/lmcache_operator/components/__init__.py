"""The components of a cluster, such as its engine pods: objects and status of each. Pure.

``registry`` is the list, and ``contract.base`` is what each implements. ``engine`` has the engine pods,
``prefill`` their prefill pods, and ``injection`` adds the cache to users' own pods. ``remote`` has the
servers of a managed remote tier, ``peers`` the list of pods that read each other, ``router`` the router, and
``autoscaling`` the chosen sizes. ``figures`` (numbers for the status) and ``images`` are parts that several
components share.
"""
