"""Autoscaling of cache tiers.

``poller`` polls sidecars for samples of their lookups, and ``intake`` checks and merges the answers.
``sizing`` keeps what one cluster's tiers need to be decided on. The package ``policy`` decides, and the
component ``components.autoscaling`` stores decisions.

The path of a sample: an engine's connector reports the keys of each scheduled request to its sidecar, which
records some of them and serves them at ``/samples``. Here, ``intake.answers`` checks the page, and
``intake.lookups`` merges the answers of one pod over time. ``policy.traffic`` computes curves over all pods,
and ``policy.decide`` chooses a size. The reconciler writes the report to the status, Events and a ConfigMap.
"""
