"""The page on engines over several nodes quotes messages that the launcher and vLLM print."""

import re

import pytest

from testing.child_process import REPOSITORY
from tests.harness.fences import DOCS

PAGE = (DOCS / "how-to" / "run-over-several-nodes.md").read_text()
ROWS = PAGE.split("| message |")[1].split("\n\n")[0].splitlines()[2:]
POD = "deepseek-engine-0-1"
MESSAGES = {message for row in ROWS for message in re.findall(r"`([^`]+)`", row.split("|")[1])}
SOURCES = "".join(
    path.read_text()
    for pattern in ("sidecar/lmcache_client/group/*.py", "tests/*/**/test_group_*.py", "operator/*/pods/*.py")
    for path in sorted(REPOSITORY.glob(pattern))
    if path.parent.name != "docs"
)
"""The code that makes the messages, and tests that compare whole messages."""


@pytest.mark.parametrize("message", sorted(MESSAGES - {POD, "Pending"}))
def test_message_of_the_page_exists(message: str) -> None:
    pattern = re.escape(message).replace(re.escape(POD), r"[\w{}-]+").replace("…", ".*")
    assert re.search(re.sub(r"\d+", r"(\\d+|{[^}]*})", pattern), SOURCES)
