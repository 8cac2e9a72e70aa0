"""Paths of requests as the middlewares compare them."""

import itertools
import urllib.parse

import pytest
from starlette.routing import Match, Route

from lmcache_client.vllm import asgi

PATH = "/v1/completions/render"


async def endpoint(*_: object) -> None: ...


@pytest.mark.parametrize("root", ["", "/", "/r", "/r/", "/v", "/v1"])
def test_path_is_the_one_that_reaches_the_route(root: str) -> None:
    """A middleware that overlooks a spelling lets a request pass with its salt."""
    route, num_matches = Route(PATH, endpoint, methods=["POST"]), 0
    ends = ("", "/", "%0A", "%0A%0A", "%0D", "%00", "%20", ";x", "/.")
    for prefix, start, end in itertools.product((root, "", "/r", "/"), ("", "/"), ends):
        path = urllib.parse.unquote(f"{prefix}{start}{PATH}{end}")
        scope = {"type": "http", "method": "POST", "path": path, "root_path": root}
        is_match = route.matches(scope)[0] is not Match.NONE
        assert (asgi.path_of(scope) == PATH) is is_match, (root, path)
        num_matches += is_match
    assert num_matches
