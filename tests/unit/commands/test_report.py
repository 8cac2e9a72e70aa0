"""``kubectl lmcache report`` with a stand-in for the API server that has logs, and faults of real ones."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from zipfile import ZipFile

import pytest
import yaml

from lmcache_cli.__main__ import main
from tests.harness.commands.command_world import pod, stats
from tests.harness.commands.json_server import JsonHandler, serving
from tests.harness.operator.model import cluster

SECRET = "hunter2-Zq8vXw"
RESTARTED = {"name": "engine", "restartCount": 2, "image": "vllm:1", "imageID": "sha256:12"}


class ApiServer(JsonHandler):
    """Serves a cluster ``team/demo`` with a pod, its logs, and a pod of the operator."""

    pods: list[Any]
    refused: frozenset[str]
    """Last parts of paths that the user may not read."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: value for key, [value] in parse_qs(url.query).items()}
        last = url.path.rpartition("/")[2]
        if last in self.refused:
            self.answer({"kind": "Status", "message": f"{last} is forbidden", "reason": "Forbidden"}, 403)
        elif last == "log":
            self.text(f"{url.path.split('/')[-2]} {query} uses {SECRET}")
        elif last == "stats":
            self.answer(stats())
        elif last == "version":
            self.answer({"gitVersion": "v1.35.0"})
        elif last == "demo":
            self.answer(cluster())
        elif last in ("v1", "v1alpha1", "v1alpha2"):
            self.answer({"resources": [{"name": "configmaps"}]})
        else:
            self.answer({"items": self.items(url.path, query.get("labelSelector", ""))})

    def items(self, path: str, selector: str) -> list[Any]:
        if path == "/api/v1/pods":
            spec = {"containers": [{"name": "operator"}]}
            return [{"metadata": {"name": "op-0", "namespace": "system", "uid": "op"}, "spec": spec}]
        if path.endswith("/lmcacheclusters"):
            return [cluster()] if not selector else []
        if path.endswith("/events"):
            named = ("demo-engine-7", "demo", "demonstration")
            return [{"involvedObject": {"name": name}, "message": name} for name in named] + [{}]
        return self.pods if path.endswith("/pods") and selector == "lmcache.io/cluster=demo" else []

    def text(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command. Returns the files of the zip file, and what is printed to standard error."""
    monkeypatch.chdir(tmp_path)

    def write(pods: list[Any], *words: str, refused: tuple[str, ...] = ()) -> tuple[dict[str, str], str]:
        with serving(ApiServer, pods=pods, refused=frozenset(refused)) as server:
            config = {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                "users": [{"name": "u", "user": {}}],
            }
            (tmp_path / "kubeconfig").write_text(json.dumps(config))
            monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
            assert main(["report", "demo", "-n", "team", *words]) == 0
        output, errors = capsys.readouterr()
        [file] = tmp_path.glob("*.zip")
        assert output.startswith(f"Wrote {file.name} ({file.stat().st_size / 1e3:,.0f} kB).")
        with ZipFile(file) as archive:
            assert archive.testzip() is None
            assert len(set(archive.namelist())) == len(archive.namelist())
            return {name: archive.read(name).decode() for name in archive.namelist()}, errors

    return write


def test_report_has_objects_figures_logs_and_versions(written) -> None:
    engine = {"name": "engine", "env": [{"name": "HF_TOKEN", "value": SECRET}]}
    restarted = pod(containers=[engine])
    restarted["status"]["containerStatuses"] = [RESTARTED]
    files, errors = written([restarted])
    assert (errors, files["errors.txt"]) == ("", "Nothing is missing.")
    assert set(files) == {
        "objects/team/LMCacheCluster/demo.yaml", "objects/team/Pod/demo-engine-0.yaml",
        "objects/system/Pod/op-0.yaml", "events.yaml", "stats/demo-engine-0.yaml", "status.txt",
        "versions/kubernetes.json", "versions/command.yaml", "logs/team/demo-engine-0/sidecar.log",
        "logs/team/demo-engine-0/engine.log", "logs/team/demo-engine-0/engine.previous.log",
        "logs/system/op-0/operator.log", "errors.txt",
    }  # fmt: skip
    assert [each["message"] for each in yaml.safe_load(files["events.yaml"])] == ["demo-engine-7", "demo"]
    assert yaml.safe_load(files["objects/team/Pod/demo-engine-0.yaml"])["kind"] == "Pod"
    assert yaml.safe_load(files["stats/demo-engine-0.yaml"]) == stats()
    assert "team/demo" in files["status.txt"]
    assert yaml.safe_load(files["versions/command.yaml"])["images"] == ["vllm:1 sha256:12"]
    log, previous = (files[f"logs/team/demo-engine-0/engine{kind}.log"] for kind in ("", ".previous"))
    assert "'tailLines': '10000'" in log
    assert "previous" not in log
    assert "'previous': 'true'" in previous
    assert SECRET not in "".join(files.values())


def test_options_limit_the_logs(written) -> None:
    files, _ = written([pod()], "--since", "1h30m", "--tail", "7")
    log = files["logs/team/demo-engine-0/engine.log"]
    assert "'sinceSeconds': '5400'" in log
    assert "'tailLines': '7'" in log


def test_parts_that_cannot_be_read_are_listed(written) -> None:
    refused = ("events", "log", "version", "configmaps", "stats")
    files, errors = written([pod(), pod(1, phase="Pending")], refused=refused)
    assert files["events.yaml"] == "[]\n"
    for name in (
        "events in team",
        "configmaps in team",
        "logs/team/demo-engine-0/engine.log",
        "versions/kubernetes",
    ):
        [line] = [line for line in files["errors.txt"].splitlines() if line.startswith(name)]
        assert "is forbidden" in line
    assert "stats/demo-engine-1.yaml: the pod is Pending" in files["errors.txt"]
    assert "events is forbidden" in errors


@pytest.mark.parametrize(
    "strange",
    [
        {"status": None}, {"spec": {"containers": None}, "status": {"containerStatuses": None}},
        {"spec": json.loads('{"a":' * 900 + "1" + "}" * 900)},
    ],
)  # fmt: skip
def test_unusual_objects_cost_no_other_part(written, strange: dict[str, Any]) -> None:
    files, _ = written([pod() | strange])
    assert "logs/system/op-0/operator.log" in files
    assert "Traceback" not in files["errors.txt"]


def test_file_that_cannot_be_written_is_named(tmp_path, monkeypatch, capsys) -> None:
    with serving(ApiServer, pods=[], refused=frozenset()) as server:
        user = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        config = {
            "current-context": "c", "contexts": [user], "users": [{"name": "u", "user": {}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        }  # fmt: skip
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        assert main(["report", "demo", "-n", "team", "-o", str(tmp_path / "missing" / "a.zip")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/missing/a.zip: No such file or directory\n"
