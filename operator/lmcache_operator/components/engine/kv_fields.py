"""Fields of the spec that cached KV depends on: after a change, engines do not find former rows. Pure.

They follow from what the connectors list as the namespace (``lmcache_client.vllm.fingerprint``). The chart's
policy ``discarded-kv`` lists the fields that can be changed: with it, kubectl warns before the change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from lmcache_operator.api.engine_kinds import VLLM
from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.engine.kinds import kind_of
from lmcache_operator.contract.base import Observed
from lmcache_operator.specs import Object, names
from lmcache_store.common.text import plain

OPTIONS = ("--block-size", "--dtype", "--kv-cache-dtype", "--page-size", "--quantization")


def kv_fields(cluster: Cluster) -> str:
    """The fields with their values, as JSON for an annotation of the pods."""
    engine, model = cluster.engine, cluster.spec.model
    options = {f"engine.args {name}": kind_of(cluster).option(engine.args, name) for name in OPTIONS}
    fields = {
        "model.name": model and model.name,
        "model.revision": model and model.revision,
        "engine.kind": engine.kind,
        # Each pod then has a part of each row. Otherwise, rows do not depend on the number of pods.
        "engine.nodes": cluster.num_parts if cluster.num_parts > 1 else None,
        "engine.parallelism.tensor": engine.parallelism.tensor,
        "engine.parallelism.pipeline": engine.parallelism.pipeline,
        "sidecar.chunkTokens": cluster.spec.sidecar.chunk_tokens if engine.kind == VLLM.name else None,
        **options,
    }
    values = {name: str(value) for name, value in fields.items() if value is not None}
    return json.dumps(values, sort_keys=True)


def discarded(observed: Observed, template: Object) -> str:
    """Fields that differ between a pod and the template, with their former values; empty: none differs."""
    present = _parsed(template)
    for former in filter(None, map(_parsed, observed.pods)):
        changed = [name for name in {**former, **present} if former.get(name) != present.get(name)]
        if changed:
            return ", ".join(f"{plain(name)} {plain(former.get(name, 'unset'), 100)}" for name in changed)
    return ""


def _parsed(pod: Object) -> Mapping[str, str]:
    """The annotation of a pod; empty if an earlier operator created the pod, or a user changed the text."""
    try:
        fields = json.loads(names.annotations_of(pod).get(names.KV_FIELDS, "{}"))
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
