"""Programs that the machine already has: taken one by one, if their version fits."""

import os
from pathlib import Path

import pytest

from tools.kube import binaries, machine

KUBERNETES, ETCD, HELM, KWOK = (
    version.removeprefix("v")
    for version in (binaries.KUBERNETES, binaries.ETCD, binaries.HELM, binaries.KWOK)
)
PRINTED = {
    "etcd": f"etcd Version: {ETCD}\nGit SHA: 1.2.3",
    "kube-apiserver": f"Kubernetes v{KUBERNETES}",
    "kube-controller-manager": f"Kubernetes v{KUBERNETES}",
    "kube-scheduler": f"Kubernetes v{KUBERNETES}",
    "kubectl": f"Client Version: v{KUBERNETES}\nKustomize Version: v5.8.1",
    "helm": f"v{HELM}+gabcdef",
    "kwok": f"kwok version v{KWOK} go1.26.8 (linux/amd64)",
}


def put(folder: Path, name: str, printed: str = "") -> Path:
    """A program that prints a version."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{printed or PRINTED[name]}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch) -> Path:
    """Folders ``assets`` ($KUBEBUILDER_ASSETS) and ``path`` (PATH), still empty; builds take no time."""
    monkeypatch.setenv("LMCACHE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "assets"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.defpath}")
    monkeypatch.setattr(binaries, "_install", lambda names, folder: [put(folder, name) for name in names])
    return tmp_path


def test_each_program_of_the_demo_has_a_rule_for_its_version():
    assert set(machine.RULES) == set(binaries.CLUSTER) == set(PRINTED)


def test_what_the_machine_lacks_is_built_and_no_more(places, capsys):
    etcd = put(places / "assets", "etcd")
    api_server = put(places / "path", "kube-apiserver")
    assert "etcd" not in machine.missing(binaries.CLUSTER)
    folder = machine.directory(binaries.CLUSTER)
    assert (folder / "etcd").resolve() == etcd
    assert (folder / "kube-apiserver").resolve() == api_server
    built = {path.name for path in binaries.cache_directory().iterdir()} - {".lock"}
    assert built == set(binaries.CLUSTER) - {"etcd", "kube-apiserver"}
    assert (folder / "helm").resolve() == (binaries.cache_directory() / "helm").resolve()
    said = capsys.readouterr().err
    assert f"taking etcd from {etcd.parent}" in said
    assert f"taking kube-apiserver from {api_server.parent}" in said
    assert machine.missing(binaries.CLUSTER) == []


def test_nothing_is_built_where_the_machine_has_all(places):
    for name in binaries.CLUSTER:
        put(places / "path", name)
    assert machine.missing(binaries.CLUSTER) == []
    folder = machine.directory(binaries.CLUSTER)
    assert {path.name for path in folder.iterdir()} == set(binaries.CLUSTER)
    assert not binaries.cache_directory().exists()


def test_the_users_assets_come_before_path(places):
    assets = put(places / "assets", "helm")
    put(places / "path", "helm")
    assert machine.programs(["helm"]) == ({"helm": assets}, [])


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("kube-apiserver", "Kubernetes v1.30.2"),
        ("etcd", "etcd Version: 3.4.23"),
        ("helm", "v4.0.1+g12"),
        ("kwok", "no version"),
    ],
)
def test_another_version_is_refused_with_the_reason(places, name, printed, capsys):
    old = put(places / "path", name, printed)
    fitting, (refusal,) = machine.programs([name])
    assert fitting == {}
    assert str(old) in refusal
    assert "is needed" in refusal
    folder = machine.directory([name])
    assert folder == binaries.cache_directory()
    assert refusal in capsys.readouterr().err


def test_a_program_that_fails_is_refused(places):
    put(places / "path", "kwok").write_text("#!/bin/sh\necho v0.8.0\nexit 1\n")
    assert machine.programs(["kwok"])[0] == {}


def test_tests_never_take_programs_from_path(places):
    for name in binaries.CLUSTER:
        put(places / "path", name)
    assert binaries.find(binaries.CLUSTER) is None
    assert binaries.directory(binaries.CLUSTER) == binaries.cache_directory()


def test_a_full_cache_is_used_as_it_is(places):
    folder = binaries.directory(binaries.CLUSTER)
    put(places / "path", "etcd")
    assert machine.directory(binaries.CLUSTER) == folder


def test_another_mix_gets_another_directory(places):
    put(places / "path", "helm")
    before = machine.directory(["helm", "kwok"])
    put(places / "assets", "helm")
    assert machine.directory(["helm", "kwok"]) != before
