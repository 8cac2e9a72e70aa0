"""Code fences of the documentation: every command runs in a test or says why not, and data parse."""

import json
import subprocess

import pytest
import yaml

from tests.harness.fences import COMMANDS, PAGES, Fence, difference, fences, pages

ALL = [fence for page in pages() for fence in fences(page)]


def test_every_fence_of_a_page_with_commands_has_a_language():
    assert len(PAGES) > 10
    assert [str(fence) for page in PAGES for fence in fences(page) if not fence.language] == []


def test_every_mark_belongs_to_a_command_or_an_output():
    texts = [page.read_text() for page in pages()]
    assert sum(text.count("<!-- not run:") for text in texts) == len(
        [fence for fence in ALL if fence.reason and fence.language in COMMANDS]
    )
    outputs = [fence for fence in ALL if fence.is_output]
    assert sum(text.count("<!-- not compared:") for text in texts) == sum(
        bool(shown.reason) for shown in outputs
    )


def test_every_output_follows_a_command():
    following = [fence.output for fence in ALL if fence.output and fence.language in COMMANDS]
    assert following == [fence for fence in ALL if fence.is_output]


def test_each_page_shows_an_output():
    assert [page for page in PAGES if not any(fence.output for fence in fences(page, *COMMANDS))] == []


SHOWN = """
NAME        READY   AGE
tiny-8b-0   1/1     15s
…
pod/tiny-8b-0 stores 1,024 rows in … (64Gi)
"""


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("", ""), ""),
        (("8b", "70b"), ""),
        (("1/1     15s", "2/2     3m20s"), ""),
        (("1,024", "0.5"), ""),
        (("memory", "disk and memory"), ""),
        (("pod/", "Events:\n\npod/"), ""),
        (("READY", "STATUS"), "NAME        READY   AGE"),
        (("8b-0  ", "8b-0"), "tiny-8b-0   1/1     15s"),
        (("15s", "15"), "tiny-8b-0   1/1     15s"),
        (("1,024", "all"), "pod/tiny-8b-0 stores 1,024 rows in … (64Gi)"),
        (("64Gi", "64Mi"), "pod/tiny-8b-0 stores 1,024 rows in … (64Gi)"),
        (("(64Gi)", "(64Gi)\nwarning"), "(no more lines)"),
    ],
)
def test_outputs_that_match(change, line):
    printed = SHOWN.replace(" …", " memory").replace("…\n", "").replace(*change)
    changed = difference(SHOWN, printed)
    assert [text[2:] for text in changed.splitlines() if text.startswith("-")] == [line][: bool(line)]


@pytest.mark.parametrize("fence", [fence for fence in ALL if fence.language in COMMANDS], ids=str)
def test_shell_commands_parse(fence: Fence):
    checked = subprocess.run(["bash", "-n"], input=fence.text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("fence", [fence for fence in ALL if fence.language in ("yaml", "json")], ids=str)
def test_data_parse(fence: Fence):
    assert list(yaml.safe_load_all(fence.text) if fence.language == "yaml" else [json.loads(fence.text)])
