"""A real Prometheus server, and its answers to queries. `make setup` installs it."""

from __future__ import annotations

import json
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from testing.child_process import free_port, wait_until
from testing.processes import Server

SCRAPE_SECONDS = 1


class MissingProgramError(RuntimeError):
    """Prometheus is not installed. The message says what to run."""


def program(name: str) -> str:
    """The path of ``prometheus`` or ``promtool``. Raises `MissingProgramError`."""
    path = shutil.which(name)
    if path is None:
        raise MissingProgramError(f"{name} is not installed: run `make setup` as root, or install Prometheus")
    return path


class PrometheusProcess(Server):
    """``with PrometheusProcess(jobs) as prometheus:`` starts a server that scrapes once a second."""

    def __init__(self, jobs: Sequence[Mapping[str, Any]]) -> None:
        """``jobs`` are the ``scrape_configs`` of Prometheus' configuration."""
        super().__init__(Path(tempfile.mkdtemp(prefix="lmc-prometheus-")))
        self._jobs = jobs
        self.url = ""

    def start(self, *, timeout: float = 60.0) -> None:
        interval = f"{SCRAPE_SECONDS}s"
        config = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval},
            "scrape_configs": self._jobs,
        }
        file = self.folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(json.loads(json.dumps(config))))  # without YAML's anchors
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        self.spawn(
            [program("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={self.folder / 'data'}",
             f"--web.listen-address={address}"],
        )  # fmt: skip
        wait_until(self._is_ready, timeout=timeout, what="Prometheus is ready")

    def query(self, promql: str) -> list[dict[str, Any]]:
        """The result of an instant query: label sets, each with a value. Raises ValueError for a bad"
        " query."""
        result: list[dict[str, Any]] = self._get("query", query=promql)["result"]
        return result

    def query_range(self, promql: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """The result of a query over time: label sets, each with pairs of a time and a value. Raises
        ValueError for a bad query."""
        times = {"start": str(start), "end": str(end), "step": str(step)}
        result: list[dict[str, Any]] = self._get("query_range", query=promql, **times)["result"]
        return result

    def label_values(self, label: str, selector: str) -> list[str]:
        """Values of a label in the series that a selector matches."""
        values: list[str] = self._get(f"label/{label}/values", **{"match[]": selector})
        return values

    def targets(self) -> list[dict[str, Any]]:
        """Active targets with their labels, their health and their last error."""
        active: list[dict[str, Any]] = self._get("targets", state="active")["activeTargets"]
        return active

    def _is_ready(self) -> bool:
        self.check()
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {json.load(error)['error']}") from error
