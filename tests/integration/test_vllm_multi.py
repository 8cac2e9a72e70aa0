"""The connector inside vLLM's MultiConnector, in first and in last place: the engine's start."""

from types import SimpleNamespace

import pytest

vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer import kv_transfer_state  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402

from testing.engine.process import connector_config, example_config, multi_config  # noqa: E402
from tests.harness.client.scheduler_rig import make_identity  # noqa: E402
from tests.harness.sim.config import SimSettings, make_configs  # noqa: E402

IDENTITY = make_identity()
OURS = connector_config("/nonexistent/kvcache.sock")


# ---- the handshake: metadata of one child is passed to all children ----


def make_multi(*children, role):
    config, cache, *_ = make_configs(SimSettings(), "/nonexistent/kvcache.sock")
    config.kv_transfer_config = KVTransferConfig(**multi_config(*children), engine_id="e")
    config.scheduler_config.disable_hybrid_kv_cache_manager = True  # vLLM sets it for ExampleConnector
    return KVConnectorFactory.create_connector(config, role, cache)


@pytest.fixture(params=["ours first", "ours last"])
def children(request, tmp_path):
    both = [OURS, example_config(tmp_path)]
    return both if request.param == "ours first" else both[::-1]


def handshake_of(multi, monkeypatch):
    """Handshake metadata of the engine's worker while this project's connector is attached."""
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", multi)
    for child in multi._connectors:
        if hasattr(child, "_worker"):
            child._worker.identity = IDENTITY
    return multi.get_handshake_metadata()


def test_engine_with_several_pipeline_stages_starts(children, monkeypatch):
    """Most connectors refuse the handshake of a second pipeline stage."""
    worker = make_multi(*children, role=KVConnectorRole.WORKER)
    scheduler = make_multi(*children, role=KVConnectorRole.SCHEDULER)
    metadata = handshake_of(worker, monkeypatch)
    handshakes = {(stage, 0): metadata for stage in range(2) if metadata is not None}
    scheduler.set_xfer_handshake_metadata_pp_aware(handshakes)
    for connector in (worker, scheduler):
        connector.shutdown()


def test_nixl_gets_only_its_own_handshake(children, monkeypatch):
    """NixlConnector's own check, without a network card."""
    module = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler")
    (check,) = [
        vars(kind)["set_xfer_handshake_metadata"]
        for kind in vars(module).values()
        if isinstance(kind, type) and "set_xfer_handshake_metadata" in vars(kind)
    ]
    with pytest.raises(ValueError, match="expects NixlHandshakePayload"):
        check(SimpleNamespace(), {(0, 0): IDENTITY})
    worker = make_multi(*children, role=KVConnectorRole.WORKER)
    assert handshake_of(worker, monkeypatch) is None  # so Nixl gets only its own handshake
    worker.shutdown()
    scheduler = make_multi(OURS, role=KVConnectorRole.SCHEDULER)
    foreign = object.__new__(module.NixlHandshakePayload)
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): foreign, (1, 0): foreign})
    (ours,) = scheduler._connectors
    assert ours._scheduler is not None
    assert ours._scheduler._lookups is None  # Nixl's handshake is not taken for one of this project's workers
    scheduler.shutdown()


def test_class_methods_work_inside_multi_connector(children):
    """MultiConnector calls classes before it creates connectors: a failure there ends the engine."""
    config, _, *_ = make_configs(SimSettings(), "/nonexistent/kvcache.sock")
    config.kv_transfer_config = KVTransferConfig(**multi_config(*children), engine_id="e")
    multi = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    multi.get_required_kvcache_layout(config)
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert multi.requires_piecewise_for_cudagraph(extra) is False
    if hasattr(multi, "supports_sleep_mode"):  # since 0.33
        assert multi.supports_sleep_mode(config.kv_transfer_config)
    figures = {"loads": 1}  # sent by the engine's process; 0.29 adds the name of the field
    payload = {"data": figures} if vllm.__version__.startswith("0.29.") else figures
    stats = multi.build_kv_connector_stats({"LMCacheClusterConnector": payload})
    assert stats.reduce()["LMCacheClusterConnector"]
    scheduler = make_multi(*children, role=KVConnectorRole.SCHEDULER)
    scheduler.get_kv_connector_stats()
    scheduler.shutdown()
    ours = make_multi(OURS, OURS, role=KVConnectorRole.SCHEDULER)
    assert ours.requires_kv_delivery is False
    ours.shutdown()
