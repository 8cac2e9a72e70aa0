"""Options of the real ``vllm serve``: refused under each of their names, or read as rendered."""

import argparse
from dataclasses import replace
from typing import Any

import pytest

from lmcache_client.vllm.attach import VLLMSettings
from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.kinds.vllm import VLLM
from lmcache_operator.specs.paths import SOCKET_PATH
from tests.harness.operator.model import cluster

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(add_help=False))


def test_every_name_of_a_reserved_option_is_refused(parser):
    known = {name for action in parser._actions for name in action.option_strings}
    assert set(VLLM.reserved) - {"--"} <= known
    for action in parser._actions:
        has_ranks = action.dest.startswith("data_parallel") or "elastic_ep" in action.dest
        if not has_ranks and not set(action.option_strings) & set(VLLM.reserved):
            continue
        for name in action.option_strings:
            is_negation = name.startswith("--no-") or name == "--enable-prefix-caching"
            assert VLLM().flag_of(name) in VLLM.reserved or is_negation
            in_one_pod = name in ("--data-parallel-size", "-dp") or is_negation
            assert not has_ranks or (name in VLLM.reserved_by_injection) != in_one_pod


def test_other_options_are_not_refused(parser):
    """An unreserved option whose name is the beginning of a reserved one would be refused by mistake."""
    for action in parser._actions:
        for name in action.option_strings:
            assert VLLM().flag_of(name) == name


def test_server_reads_data_and_expert_parallelism(parser):
    parallelism = {"tensor": 2, "data": 4, "expert": True}
    rendered = VLLM().args(parse(cluster(engine={"gpu": {"count": 8}, "parallelism": parallelism})), 60)
    parsed = parser.parse_args(rendered)
    assert (parsed.tensor_parallel_size, parsed.data_parallel_size, parsed.enable_expert_parallel) == (
        2,
        4,
        True,
    )


def test_connector_reads_the_settings_of_blending(parser):
    def settings_of(**blend: Any) -> VLLMSettings:
        rendered = VLLM().args(parse(cluster(engine={"blend": {"mode": "Request", **blend}})), 60)
        return VLLMSettings.read(parser.parse_args(rendered).kv_transfer_config.kv_connector_extra_config)

    defaults = settings_of()
    assert defaults == VLLMSettings(SOCKET_PATH, kv_cache_layout="BLHNC", blend="request")
    for selection in ("Attended", "Deviation", "First"):
        given = settings_of(selection=selection, ratioPercent=29, minTokens=4096)
        changed = {"blend_selection": selection.lower(), "blend_ratio": 0.29, "blend_min_tokens": 4096}
        assert given == replace(defaults, **changed)
    for separator in (" ###\n", '$$ $(POD_NAME) \\ " “ \U0001f999'):
        assert settings_of(separator=separator) == replace(defaults, blend_separator=separator)
    assert settings_of(separator="") == defaults
