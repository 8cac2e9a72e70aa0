"""Pods of SGLang: command line, refused arguments, probes, images, and who copies KV."""

from typing import Any

import pytest

from lmcache_operator.api.engine_kinds import ENGINE_KINDS
from lmcache_operator.api.engine_kinds import SGLANG as SGLANG_API
from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.engine.kinds import KINDS, kind_of
from lmcache_operator.components.engine.kinds.base import option_name
from lmcache_operator.contract.base import Context
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.names import STOCK_IMAGES
from tests.harness.operator.model import World, cluster
from tests.harness.operator.plans import observe, settled_world
from tests.harness.operator.render import CONTEXT, container, env_of, pod_of

SGLANG: dict[str, Any] = {"kind": "SGLang"}


def pod(**changes: Any) -> dict[str, Any]:
    """The rendered pod."""
    return pod_of(**changes | {"engine": SGLANG | changes.get("engine", {})})


def engine_of(**changes: Any) -> dict[str, Any]:
    """The rendered container of the engine."""
    return pod(**changes)["containers"][0]


def args_of(*args: str) -> list[str]:
    return engine_of(engine={"args": list(args)})["args"]


def test_parallel_sizes_and_revision_are_arguments():
    """The golden file has all other arguments."""
    parallel = {"gpu": {"count": 8}, "parallelism": {"tensor": 2, "pipeline": 2, "data": 2}}
    args = engine_of(engine=parallel, model={"revision": "main"})["args"]
    assert {"--tp-size=2", "--pp-size=2", "--dp-size=2", "--revision=main"} <= set(args)


@pytest.mark.parametrize(
    ("args", "left_out"),
    [
        (["--page-size=32"], "--page-size"),
        (["--page", "32"], "--page-size"),
        (["--hicache-ratio", "0.5"], "--hicache-ratio"),
        (["--hicache-storage-prefetch-policy=best_effort"], "--hicache-storage-prefetch-policy"),
        (["--hicache-write-policy=write_back"], "--hicache-write-policy"),
        (["--served-model-name=llm"], "--served-model-name"),
        (["--enable-metrics"], "--enable-metrics"),
    ],
)
def test_arguments_of_the_user_replace_defaults(args: list[str], left_out: str) -> None:
    rendered = args_of(*args)
    assert rendered[-len(args) :] == args
    by_operator = rendered[: -len(args)]
    assert [arg for arg in args_of() if arg not in by_operator] == [
        arg for arg in args_of() if option_name(arg) == left_out
    ]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--hicache-storage-backend=file"], "--hicache-storage-backend can't be set: it loads LMCache"),
        (["--hicache_storage_backend", "file"], "--hicache-storage-backend can't be set"),
        (["--hicache-storage-backend-extra-config={}"], "names the socket of the sidecar"),
        (["--hicache-storage-backend-ex", "{}"], "--hicache-storage-backend-extra-config can't be set"),
        (["--hicache-mem-layout=page_first"], "LMCache copies whole pages"),
        (["--hicache-io-backend", "kernel"], "LMCache copies whole pages"),
        (["--enable-unified-memory"], "LMCache copies whole pages"),
        (["--disable-radix-cache"], "the engine has no prefixes to store"),
        (["--disable-rad"], "--disable-radix-cache can't be set"),
        (["--enable-lmcache"], "it would replace HiCache"),
        (["--enable-flexkv"], "it would replace HiCache"),
        (["--enable-unified-cache-external-linker"], "it would replace HiCache"),
        (["--radix-cache-backend=x"], "it would replace HiCache"),
        (["--dcp-size=2"], "the engine would run without its cache"),
        (["--page-size=8"], "a page must have at least 16 tokens: the engine would run without its cache"),
        (["--page", "1"], "a page must have at least 16 tokens"),
        (["--attn-dp-size=2"], "an engine is one pod"),
        (["--data-p=2"], "it is set by spec.engine.parallelism.data"),
        (["--enable-dp-attention"], "an engine is one pod"),
        (["--dwdp-size=2"], "an engine is one pod"),
        (["--elastic-ep-backend=mooncake"], "an engine is one pod"),
        (["--node-rank", "1"], "an engine is one pod"),
        (["--nccl-init-addr=h:1"], "an engine is one pod"),
        (["--use-ray"], "an engine is one pod"),
        (["--tensor-p=2"], "it is set by spec.engine.parallelism.tensor"),
        (["--pipeline-p=2"], "it is set by spec.engine.parallelism.pipeline"),
        (["--disaggregation-mode=prefill"], "to split prefill and decode over pods, set spec.engine.prefill"),
        (["--encoder-only"], "to split prefill and decode over pods, set spec.engine.prefill"),
        (["--config=/models/all.yaml"], "a file may hold options that can't be set"),
        (["--model=x"], "it is set by spec.model.name"),
        (["--revision=x"], "it is set by spec.model.revision"),
        (["--host=::"], "expect the engine on all addresses"),
        (["--port=1"], "expect the engine on port 8000"),
        (["--grpc-mode"], "expect the engine's HTTP server on a port"),
        (["--"], "what follows it would not be read as options"),
        (["other/model"], "'other/model' belongs to no option: the engine would not start"),
    ],
)
def test_arguments_that_break_the_cache_are_refused(args: list[str], sentence: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        args_of(*args)
    assert caught.value.path == "spec.engine.args[0]"
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "args",
    [
        ["--context-length", "8192"], ["--hicache-size=4"], ["--lora-paths", "a=b", "c=d"],
        ["--enable-metrics"], ["--mem-fraction-static=0.8"], ["--dist-timeout=9"],
        ["--hicache-host-memory-mode=cache"], ["--page-size=16"], ["--attn-cp-size=2"],
        ["--language-model-only"], ["--grpc-port=1"], ["--tokenizer-path=x"], ["--ep-size=2"],
    ],
)  # fmt: skip
def test_other_arguments_are_passed_on(args: list[str]) -> None:
    assert args_of(*args)[-len(args) :] == args


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sidecar": {"transfer": "CudaIPC"}}, "copies its KV itself: set sidecar.transfer to Auto or"),
        ({"sidecar": {"chunkTokens": 512}}, "leave it out, and set --page-size in engine.args"),
        ({"engine": {"kind": "sglang"}}, "spec.engine.kind: must be one of"),
    ],
)
def test_settings_of_vllm_are_refused(changes: Any, sentence: str) -> None:
    with pytest.raises(InvalidSpecError, match=sentence):
        pod(**changes)
    if "sidecar" in changes:
        assert parse(cluster(**changes))


@pytest.mark.parametrize("allow_all_gpus", [False, True])
@pytest.mark.parametrize("gpu", [{"count": 1}, {"count": 1, "deviceClassName": "gpu.nvidia.com"}])
def test_sidecar_of_sglang_sees_no_gpus(gpu: dict[str, Any], allow_all_gpus: bool) -> None:
    context = Context(STOCK_IMAGES, allow_all_gpus=allow_all_gpus)
    changes = {"engine": SGLANG | {"gpu": gpu}}
    resource = cluster(**changes)
    assert Engine().plan(parse(resource), observe(World(resource)), context).fields["transfer"] == {
        "requested": "Auto", "mode": "SharedMemory", "reason": "EngineCopies",
        "message": "SGLang copies its KV through its host memory",
    }  # fmt: skip
    rendered = pod_of(context, **changes)
    sidecar, engine = (container(rendered, name) for name in ("sidecar", "engine"))
    assert env_of(sidecar)["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert "claims" not in sidecar["resources"]
    assert ("claims" in engine["resources"]) == ("deviceClassName" in gpu)


def test_upgrade_of_the_operator_keeps_the_image_of_sglang() -> None:
    world = settled_world(engine=SGLANG)
    later = CONTEXT._replace(engine_images={"SGLang": "sglang:next"})
    observed = observe(world)
    plan = Engine().plan(Engine().with_records(parse(world.resource), observed), observed, later)
    assert (plan.apply, plan.evict) == ((), ())
    assert plan.fields["images"]["engine"] == SGLANG_API.image
    assert "engine sglang:next" in plan.fields["images"]["message"]


def test_every_kind_of_the_api_has_an_implementation() -> None:
    assert [kind.name for kind in KINDS] == [*ENGINE_KINDS]
    for kind in KINDS:
        assert kind_of(parse(cluster(engine={"kind": kind.name}))) is kind
        assert set(kind.reserved) <= set(kind.read)
        assert set(kind.reserved_by_injection) <= set(kind.reserved)
