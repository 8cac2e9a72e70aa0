"""The connector facade with the engine's own classes: faults in any hook, both runners, and KV layouts."""

import hashlib
import importlib
import inspect
import io
import logging
import re
import time
from functools import partial
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm

vllm = pytest.importorskip("vllm")

import torch  # noqa: E402
from vllm import _custom_ops as ops  # noqa: E402
from vllm.config import CacheConfig, KVTransferConfig, ParallelConfig  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.distributed.kv_transfer import kv_transfer_state  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout  # noqa: E402
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402

from lmcache_client.core.jobs import StepMeta  # noqa: E402
from lmcache_client.errors import UnsupportedError  # noqa: E402
from lmcache_client.vllm import connector as module  # noqa: E402
from lmcache_client.vllm import support  # noqa: E402
from lmcache_client.vllm.attach import can_wait  # noqa: E402
from lmcache_client.vllm.connector import LMCacheClusterConnector  # noqa: E402
from lmcache_client.vllm.layouts import check_supported  # noqa: E402
from lmcache_client.vllm.places import RankPlace  # noqa: E402
from testing.engine.process import connector_config  # noqa: E402
from testing.engine.tiny_model import tiny_model  # noqa: E402
from tests.harness.client.scheduler_rig import make_identity  # noqa: E402

IDENTITY = make_identity()
BLOCKS = SimpleNamespace(get_block_ids=lambda: ([4, 5],))


def make_config():
    transfer = KVTransferConfig(
        kv_connector="LMCacheClusterConnector",
        kv_connector_module_path="lmcache_client.vllm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"lmcache.socket": "/nonexistent/kvcache.sock"},
    )
    parallel = SimpleNamespace(world_size=1, data_parallel_size=1)
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=parallel,
        model_config=SimpleNamespace(max_model_len=1024, is_moe=False),
        kv_events_config=None,
        instance_id="test",
        num_speculative_tokens=0,
    )


@pytest.fixture
def scheduler():
    connector = LMCacheClusterConnector(
        make_config(), KVConnectorRole.SCHEDULER, SimpleNamespace(num_blocks=100)
    )
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): IDENTITY})
    yield connector
    connector.shutdown()


@pytest.fixture
def worker():
    connector = LMCacheClusterConnector(make_config(), KVConnectorRole.WORKER, None)
    connector.bind_connector_metadata(StepMeta())
    yield connector
    connector.shutdown()


def make_request(request_id="r"):
    return SimpleNamespace(
        request_id=request_id,
        num_tokens=64,
        num_computed_tokens=64,
        block_hashes=[b"1", b"2"],
        lora_request=None,
        cache_salt=None,
        skip_reading_prefix_cache=False,
        resumable=False,
    )


def make_output():
    output = SchedulerOutput.make_empty()
    is_old = "block_ids" in KVConnectorBlockState.__dataclass_fields__  # vLLM 0.29
    output.kv_connector_block_state = KVConnectorBlockState(*(({}, {}) if is_old else (set(), {}.get, {})))
    return output


SCHEDULER_HOOKS = [
    ("on_new_request", lambda: (make_request(),), None),
    ("get_num_new_matched_tokens", lambda: (make_request(), 0), (0, False)),
    ("update_state_after_alloc", lambda: (make_request(), BLOCKS, 0), None),
    ("build_connector_meta", lambda: (make_output(),), StepMeta(is_idle=True)),
    ("update_connector_output", lambda: (KVConnectorOutput(),), None),
    ("request_finished_all_groups", lambda: (make_request(), ([4, 5],)), (False, None)),
    ("request_finished", lambda: (make_request(), [4, 5]), (False, None)),
]
WORKER_HOOKS = [
    ("handle_preemptions", lambda: (StepMeta(),), None),
    ("start_load_kv", lambda: (None,), None),
    ("wait_for_save", tuple, None),
    ("get_finished", lambda: (set(),), (set(), set())),
    ("get_block_ids_with_load_errors", tuple, set()),
    ("build_connector_worker_meta", tuple, None),
]


class Broken:
    """Raises on every access until it is offline."""

    def __init__(self, side):
        self._side = side
        self._is_offline = False

    def go_offline(self):
        self._is_offline = True
        self._side.go_offline()

    def __getattr__(self, name):
        if self._is_offline:
            return getattr(self._side, name)
        raise ZeroDivisionError(name)


@pytest.mark.parametrize(("hook", "arguments", "neutral"), SCHEDULER_HOOKS)
def test_fault_in_a_scheduler_hook_disables_the_connector(scheduler, hook, arguments, neutral, caplog):
    scheduler._scheduler = Broken(scheduler._scheduler)
    assert getattr(scheduler, hook)(*arguments()) == neutral
    for name, other_arguments, value in SCHEDULER_HOOKS:
        assert getattr(scheduler, name)(*other_arguments()) == value
    assert scheduler._scheduler._is_offline
    assert " failed, and this process stays offline until the engine restarts" in caplog.text
    said = caplog.text.count("is OFF")
    scheduler._off._reminders._clock = lambda: time.monotonic() + 601
    scheduler.build_connector_meta(make_output())
    assert caplog.text.count("is OFF") == said + 1


@pytest.mark.parametrize(("hook", "arguments", "neutral"), WORKER_HOOKS)
def test_fault_in_a_worker_hook_disables_the_connector(worker, hook, arguments, neutral):
    worker._worker = Broken(worker._worker)
    assert getattr(worker, hook)(*arguments()) == neutral
    for name, other_arguments, value in WORKER_HOOKS:
        assert getattr(worker, name)(*other_arguments()) == value


@pytest.mark.parametrize("hook", ["update_state_after_alloc", "build_connector_meta"])
def test_fault_reports_pending_loads_as_failed(scheduler, worker, hook):
    scheduler.on_new_request(make_request())
    healthy, broken = scheduler._scheduler, Broken(scheduler._scheduler)
    scheduler._scheduler = broken if hook == "update_state_after_alloc" else healthy
    scheduler.update_state_after_alloc(make_request(), BLOCKS, 64)
    scheduler._scheduler = broken
    meta = scheduler.build_connector_meta(make_output())
    worker._worker = Broken(worker._worker)
    worker.bind_connector_metadata(meta)
    worker.start_load_kv(None)
    received = set()
    while not received:
        received = worker.get_finished(set())[1]
    assert received == {"r"}
    assert worker.get_block_ids_with_load_errors() == {4, 5}


@pytest.mark.parametrize("fault", ["version", "import"])
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_connector_that_cannot_start_does_nothing(fault, role, monkeypatch):
    if fault == "version":
        monkeypatch.setattr(vllm, "__version__", "0.99.0")
    else:
        monkeypatch.setattr(module, "_make_scheduler", lambda *_: exec("import no_such_module"))
        monkeypatch.setattr(module, "_make_worker", lambda *_: exec("import no_such_module"))
    connector = LMCacheClusterConnector(make_config(), role, None)
    assert connector.requires_kv_delivery is False
    connector.register_kv_caches({})
    connector.bind_connector_metadata(KVConnectorMetadata())
    assert isinstance(connector.build_connector_meta(make_output()), KVConnectorMetadata)
    assert connector.get_num_new_matched_tokens(make_request(), 0) == (0, False)
    assert connector.request_finished_all_groups(make_request(), ([],)) == (False, None)
    connector.start_load_kv(None)
    connector.wait_for_save()
    assert connector.get_finished(set()) == (None, None)
    assert connector.get_handshake_metadata() is None
    connector.shutdown()


def test_engine_that_cannot_be_cached_says_so_every_ten_minutes(monkeypatch, caplog):
    """The scheduler side speaks for the engine. Each step asks whether it is time to do so again."""
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    connector, _ = (LMCacheClusterConnector(make_config(), role, None) for role in KVConnectorRole)
    for now in (100, 599, 1300, 1301):
        connector._off._reminders._clock = partial(float, time.monotonic() + now)
        connector.build_connector_meta(make_output())
    lines = [record.message for record in caplog.records if "is OFF" in record.message]
    assert len(lines) == 2
    assert set(lines) == {lines[0]}
    assert "this engine cannot be cached: " in lines[0]


def test_messages_have_the_form_of_vllms(monkeypatch):
    """vLLM configures only the logger of its name. Others would print a warning without its level."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", False)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    for name in ("lmcache_client", "lmcache_store"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.INFO)
    importlib.reload(support)  # engines import it after vLLM has configured its logger
    logging.getLogger("lmcache_store").setLevel(logging.ERROR)  # by the user
    LMCacheClusterConnector(make_config(), KVConnectorRole.SCHEDULER, None)
    assert "\nWARNING LMCache Cluster is OFF, the engine runs without its cache: " in stream.getvalue()
    logging.getLogger("lmcache_client.rpc").info("is on")
    assert "\nINFO is on\n" in stream.getvalue()
    assert logging.getLogger("lmcache_store").level == logging.ERROR
    monkeypatch.setattr(logging.root, "handlers", [handler])  # by a library, later
    stream.truncate(0)
    logging.getLogger("lmcache_client").warning("once")
    assert stream.getvalue().count("once") == 1


def test_unsupported_kv_caches_leave_the_engine_unchanged(worker, caplog):
    worker.register_kv_caches({"layer": "not a tensor"})
    assert worker.get_handshake_metadata() is None
    assert worker.get_finished(set()) == (set(), set())
    worker._worker.off._reminders._clock = lambda: time.monotonic() + 601
    assert worker.get_finished(set()) == (set(), set())
    assert caplog.text.count("is OFF, the engine runs without its cache: this engine cannot be cached: ") == 2


def test_handshake_inside_another_connector_is_empty(worker, monkeypatch):
    """vLLM would pass the handshake to all children of the other connector, which fail on it."""
    worker._worker.identity = IDENTITY
    for agent, expected in ((worker, IDENTITY), (object(), None)):
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", agent)
        assert worker.get_handshake_metadata() is expected


def test_hooks_have_the_signatures_of_the_base_class():
    for name, hook in vars(LMCacheClusterConnector).items():
        base = getattr(KVConnectorBase_V1, name, None)
        if inspect.isfunction(hook) and base is not None and not name.startswith("__"):
            assert list(inspect.signature(hook).parameters) == list(inspect.signature(base).parameters), name


def test_content_of_the_cpu_backend_is_unchanged():
    """If this test fails, the content needs a new id in ``layouts.KNOWN_CONTENTS``."""
    num_heads, tokens, head_size = 2, 32, 64
    key = torch.arange(tokens * num_heads * head_size, dtype=torch.float32).view(tokens, num_heads, head_size)
    value = -key - 1
    kv = torch.zeros(2, num_heads, tokens, 2 * head_size)
    k_cache, v_cache = kv.view(2, num_heads, 2, tokens, head_size).unbind(2)
    ops.cpu_attn_reshape_and_cache(key, value, k_cache, v_cache, torch.arange(tokens) + tokens, "vec")
    for head in range(num_heads):
        page = kv[1, head].flatten()
        half = head_size * tokens
        assert torch.equal(page[:half].view(head_size, tokens).T, key[:, head])
        assert torch.equal(page[half:].view(tokens, head_size), value[:, head])
    assert hashlib.sha256(kv[1].numpy().tobytes()).hexdigest()[:16] == "6657e881a1eeb097"


@pytest.mark.parametrize(
    ("setting", "supported", "expected"),
    [
        ("BLHNC", ["LBNHC", "BLHNC"], "BLHNC"),
        ("BLHNC", ["LBNHC"], "LBNHC"),
        (None, ["LBNHC", "BLHNC"], "LBNHC"),
        ("NHD", ["LBNHC", "BLHNC"], "LBNHC"),
    ],
)
def test_configured_layout_is_requested_from_the_engine(monkeypatch, setting, supported, expected):
    """With an unsupported or invalid setting, the engine still runs."""
    config = layout_config({} if setting is None else {"lmcache.kv_cache_layout": setting})
    assert LMCacheClusterConnector.get_required_kvcache_layout(config) is None, "a CPU has one layout"
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert resolve_kv_cache_layout(config, [supported]).name == expected


def test_unset_layout_leaves_the_choice_to_other_connectors(monkeypatch):
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    ours = {
        "kv_connector": "LMCacheClusterConnector",
        "kv_connector_module_path": "lmcache_client.vllm.connector",
        "kv_role": "kv_both",
    }
    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    config = layout_config({"connectors": [ours, other]})
    config.kv_transfer_config.kv_connector = "MultiConnector"
    config.kv_transfer_config.kv_connector_module_path = None
    assert resolve_kv_cache_layout(config, [["LBNHC", "LBHNC"]]).name == "LBHNC"


def layout_config(extra):
    config = make_config()
    config.kv_transfer_config.kv_connector_extra_config = extra
    config.cache_config = CacheConfig()
    config.attention_config = SimpleNamespace(hisparse_config=None)
    return config


def test_engine_that_returns_experts_is_refused():
    transfer = KVTransferConfig(**connector_config("unused"))
    settings = {"model": str(tiny_model()), "kv_transfer_config": transfer}
    config = EngineArgs(**settings).create_engine_config()
    check_supported(config, SimpleNamespace())
    if hasattr(config, "aux_output_config"):
        config.aux_output_config.enable_return_routed_experts = True
        with pytest.raises(UnsupportedError, match="without --enable-return-routed-experts"):
            check_supported(config, SimpleNamespace())
    else:
        with pytest.raises(ValueError, match="incompatible with KV connectors"):
            EngineArgs(**settings, enable_return_routed_experts=True).create_engine_config()


@pytest.mark.parametrize(
    ("num_parts", "sizes"),
    [
        (2, {"tensor_parallel_size": 2, "nnodes": 2}),
        (2, {"pipeline_parallel_size": 2, "nnodes": 4, "data_parallel_size": 2}),
        (1, {"tensor_parallel_size": 2, "nnodes": 2, "data_parallel_size": 4, "data_parallel_size_local": 2}),
        (1, {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    ],
)
@pytest.mark.parametrize("is_follower", [False, True])
def test_ranks_on_each_node_of_a_data_parallel_rank_are_a_part(num_parts, sizes, is_follower):
    config = make_config()
    config.kv_transfer_config = KVTransferConfig(**connector_config("unused"))
    num_nodes = sizes.get("nnodes", 1)
    node = num_nodes - 1 if is_follower else 0
    parallel = ParallelConfig(**sizes, node_rank=node, distributed_executor_backend="mp")
    config.parallel_config = parallel
    check_supported(config, SimpleNamespace(), world_nodes=num_nodes)
    place = RankPlace.of(parallel, 1 if is_follower else 0, replicas=1)
    assert (place.part, place.num_parts) == (num_parts - 1 if is_follower else 0, num_parts)


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "world_nodes"),
    [
        (1, {"distributed_executor_backend": "mp"}, 2),
        (2, {"distributed_executor_backend": "mp"}, 4),
        (1, {"distributed_executor_backend": "external_launcher", "nnodes": 2}, 1),
    ],
)
def test_rank_that_a_launcher_spread_over_nodes_is_refused(
    num_ranks, sizes, world_nodes, monkeypatch, caplog
):
    """Ray and ``torchrun`` place workers on nodes of which vLLM's configuration does not know."""
    config = make_config()
    config.kv_transfer_config = KVTransferConfig(**connector_config("unused"))
    config.parallel_config = ParallelConfig(data_parallel_size=num_ranks, tensor_parallel_size=2, **sizes)
    monkeypatch.setattr(parallel_state, "_NODE_COUNT", world_nodes)
    worker = LMCacheClusterConnector(config, KVConnectorRole.WORKER, SimpleNamespace(num_blocks=100))
    worker.register_kv_caches({})
    assert worker._worker.identity is None, "the scheduler side stays off without it"
    (message,) = (line.getMessage() for line in caplog.records if line.name.startswith("lmcache_client"))
    assert re.search(r"spans 2 nodes.* --nnodes and --distributed-executor-backend mp.* of a node", message)


@pytest.mark.parametrize("is_moe", [True, False])
def test_only_ranks_of_mixture_of_experts_models_never_wait(is_moe):
    """vLLM reconfigures the data-parallel ranks of other models, which do not step together."""
    config = make_config()
    config.model_config.is_moe = is_moe
    config.parallel_config = ParallelConfig(data_parallel_size=2, data_parallel_size_local=2)
    if not is_moe:
        config.parallel_config.reconfigure_for_independent_dp_rank()
    assert can_wait(config) is not is_moe
    worker = LMCacheClusterConnector(config, KVConnectorRole.WORKER, SimpleNamespace(num_blocks=100))
    assert worker._worker._can_wait is not is_moe
