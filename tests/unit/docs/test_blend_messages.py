"""The guide to blended documents quotes messages that the connector logs."""

import re

from testing.child_process import REPOSITORY
from tests.harness.fences import DOCS

SOURCES = "".join(
    path.read_text() for path in sorted(REPOSITORY.glob("sidecar/lmcache_client/vllm/blend/*.py"))
)


def test_messages_of_the_guide_exist() -> None:
    page = (DOCS / "guides" / "blend.md").read_text()
    messages = re.findall(r"grep '([^']+)'|log of the engine says `([^`]+)`", page)
    assert len(messages) == 2
    for message in map("".join, messages):
        assert message in SOURCES
