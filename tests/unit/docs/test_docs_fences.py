"""Code fences of the documentation: every command runs in a test or says why not, and data parse."""

import json
import subprocess

import pytest
import yaml

from tests.harness.fences import COMMANDS, PAGES, Fence, fences, pages

ALL = [fence for page in pages() for fence in fences(page)]


def test_every_fence_of_a_page_with_commands_has_a_language():
    assert len(PAGES) > 10
    assert [str(fence) for page in PAGES for fence in fences(page) if not fence.language] == []


def test_every_mark_belongs_to_a_command():
    marks = sum(page.read_text().count("<!-- not run:") for page in pages())
    assert marks == sum(fence.language in COMMANDS for fence in ALL if fence.reason)


@pytest.mark.parametrize("fence", [fence for fence in ALL if fence.language in COMMANDS], ids=str)
def test_shell_commands_parse(fence: Fence):
    checked = subprocess.run(["bash", "-n"], input=fence.text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("fence", [fence for fence in ALL if fence.language in ("yaml", "json")], ids=str)
def test_data_parse(fence: Fence):
    assert list(yaml.safe_load_all(fence.text) if fence.language == "yaml" else [json.loads(fence.text)])
