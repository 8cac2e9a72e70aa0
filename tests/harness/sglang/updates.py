"""A trainer: sends weights to SGLang servers in the ways that SGLang offers."""

import base64
import os
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from testing.child_process import REPOSITORY, free_port
from testing.sglang.engine import SGLangEngine

GROUP = "trainer"


def update_from_disk(engine: SGLangEngine, model: Path) -> None:
    """Let the server load another model's files."""
    engine.update_weights_from_disk(model)


def update_from_tensors(engine: SGLangEngine, model: Path) -> None:
    """Send all weights in one message, as a trainer on the same machine does."""
    content = base64.b64encode(pickle.dumps(list(_weights(model).items()))).decode()
    engine.request("POST", "/begin_weight_update", {})
    engine.request("POST", "/update_weights_from_tensor", {"serialized_named_tensors": [content]})
    engine.request("POST", "/end_weight_update", {})


def update_from_trainer(engine: SGLangEngine, model: Path) -> None:
    """Broadcast all weights from another process, as a trainer on other machines does."""
    port = free_port()
    command = [sys.executable, "-m", "tests.harness.sglang.updates", str(port), str(model)]
    with subprocess.Popen(command, cwd=REPOSITORY) as trainer:
        try:
            group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
            group |= {"group_name": GROUP, "backend": "gloo"}
            engine.request("POST", "/init_weights_update_group", group)
            engine.request("POST", "/begin_weight_update", {})
            weights = _weights(model)
            body = {
                "names": list(weights),
                "dtypes": [str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
                "shapes": [list(weight.shape) for weight in weights.values()],
                "group_name": GROUP,
            }
            engine.request("POST", "/update_weights_from_distributed", body)
            engine.request("POST", "/end_weight_update", {})
            engine.request("POST", "/destroy_weights_update_group", {"group_name": GROUP})
            assert trainer.wait(60) == 0
        finally:
            trainer.kill()


def _weights(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def _broadcast(port: int, model: Path) -> None:
    """Be the first rank of a process group, and broadcast all weights to the second rank."""
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    # SGLang forms the group by the same calls (``init_custom_process_group``).
    store, *_ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2))
    prefixed, timeout = c10d.PrefixStore(GROUP, store), timedelta(seconds=60)
    name: Any = GROUP
    group, _ = c10d._new_process_group_helper(
        2, 0, [], c10d.Backend("gloo"), prefixed, group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    for weight in _weights(model).values():
        distributed.broadcast(weight, src=0, group=group)
    os._exit(0)  # torch aborts a process that leaves a group whose other ranks have ended


if __name__ == "__main__":
    _broadcast(int(sys.argv[1]), Path(sys.argv[2]))
