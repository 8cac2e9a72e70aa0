"""The options of the real ``vllm serve``: those that break the cache are refused by each of their names."""

import argparse

import pytest
from lmcache_operator.components.engine.vllm import RESERVED, flag_of

pytestmark = pytest.mark.vllm
_BY_THE_DEFINITION = {"-tp", "-pp"}
"""Refused by the CRD itself."""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(add_help=False))


def test_every_name_of_what_is_refused_is_refused(parser):
    known = {name for action in parser._actions for name in action.option_strings}
    assert set(RESERVED) - {"--"} <= known
    for action in parser._actions:
        if not set(action.option_strings) & set(RESERVED):
            continue
        for name in action.option_strings:
            is_negation = name.startswith("--no-") or name == "--enable-prefix-caching"
            assert flag_of(name) in RESERVED or name in _BY_THE_DEFINITION or is_negation


def test_nothing_else_is_taken_for_it(parser):
    """A name that is the beginning of a refused one would be."""
    for action in parser._actions:
        for name in action.option_strings:
            is_one_pod = action.dest.startswith("data_parallel")
            assert is_one_pod or flag_of(name) == name
