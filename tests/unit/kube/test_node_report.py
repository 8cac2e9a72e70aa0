"""The report of a failed node."""

import subprocess
import urllib.error
from types import SimpleNamespace

from testing.node.report import report


def no_answer(*_):
    raise urllib.error.URLError("connection refused")


def refuse(*argv):
    raise subprocess.CalledProcessError(1, argv, stderr="was the server stopped?")


def test_report_contains_component_logs_without_api_server():
    components = {"etcd": SimpleNamespace(log="disk is full")}
    node = SimpleNamespace(kubectl=refuse, api=SimpleNamespace(objects=no_answer), components=components)
    text = report(node)
    assert "was the server stopped?" in text
    assert "disk is full" in text
