"""Options of the real ``vllm serve``: those that break the cache are refused under each of their names."""

import argparse

import pytest

from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.kinds.vllm import VLLM
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
