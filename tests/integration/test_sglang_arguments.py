"""Options of the real SGLang server: those that break the cache are refused under each of their names."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.kinds.base import option_name
from lmcache_operator.components.engine.kinds.sglang import SGLang

from testing.sglang.environment import variables
from tests.harness.operator_model import cluster

pytestmark = pytest.mark.sglang
KIND = SGLang()
CLUSTER = parse(cluster(engine={"kind": KIND.name}, model={"revision": "main"}))
_DUMP = """\
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
parsed = vars(parser.parse_args(sys.argv[1:]))
options = {name: action.option_strings for action in parser._actions for name in action.option_strings}
print(json.dumps({"options": options, "parsed": {name: str(value) for name, value in parsed.items()}}))
"""


@pytest.fixture(scope="module")
def server():
    """All names of each option by name, and the values of the rendered arguments, as SGLang reads them."""
    command = [sys.executable, "-W", "ignore", "-c", _DUMP, *KIND.args(CLUSTER, 60)]
    completed = subprocess.run(command, env={**os.environ, **variables()}, stdout=subprocess.PIPE, check=True)
    return json.loads(completed.stdout.splitlines()[-1])


def test_every_name_of_a_reserved_option_is_refused(server):
    options = server["options"]
    for reserved in (KIND.reserved, KIND.reserved_by_injection):
        assert set(reserved) - {"--"} <= options.keys()
        names = {name for option in reserved if option != "--" for name in options[option]}
        assert names <= set(reserved)


def test_other_options_are_not_refused(server):
    """An unreserved option whose name is the beginning of a reserved one would be refused by mistake."""
    for name in server["options"]:
        assert KIND.flag_of(name) == name
        added = [option_name(arg) for arg in KIND.cache_args(CLUSTER)]
        begun = [option for option in (*KIND.reserved_by_injection, *added) if option.startswith(name)]
        assert not begun or name in begun


def test_server_reads_the_rendered_arguments(server):
    parsed = server["parsed"]
    for arg in KIND.args(CLUSTER, 60):
        name, has_value, value = arg.partition("=")
        destination = name.removeprefix("--").replace("-", "_")
        assert parsed[destination] == (value if has_value else "True")
