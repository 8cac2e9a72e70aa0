"""Programs installed on the machine: each is used if its version fits."""

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


def create_program(folder: Path, name: str, printed: str = "") -> Path:
    """Create a program that prints a version."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{printed or PRINTED[name]}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch) -> Path:
    """Empty folders ``assets`` ($KUBEBUILDER_ASSETS) and ``path`` (PATH). Builds finish at once."""
    monkeypatch.setenv("LMCACHE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "assets"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.defpath}")
    monkeypatch.setattr(
        binaries, "_install", lambda names, folder: [create_program(folder, name) for name in names]
    )
    return tmp_path


def test_only_missing_programs_are_built(places, capsys):
    etcd = create_program(places / "assets", "etcd")
    api_server = create_program(places / "path", "kube-apiserver")
    assert "etcd" not in machine.missing(binaries.CLUSTER)
    folder = machine.directory(binaries.CLUSTER)
    assert ((folder / "etcd").resolve(), (folder / "kube-apiserver").resolve()) == (etcd, api_server)
    built = {path.name for path in binaries.cache_directory().iterdir()} - {".lock"}
    assert built == set(binaries.CLUSTER) - {"etcd", "kube-apiserver"}
    assert (folder / "helm").resolve() == (binaries.cache_directory() / "helm").resolve()
    messages = capsys.readouterr().err
    assert f"taking etcd from {etcd.parent}" in messages
    assert f"taking kube-apiserver from {api_server.parent}" in messages
    assert machine.missing(binaries.CLUSTER) == []


def test_nothing_is_built_if_the_machine_has_all_programs(places):
    for name in binaries.CLUSTER:
        create_program(places / "path", name)
    assert machine.missing(binaries.CLUSTER) == []
    folder = machine.directory(binaries.CLUSTER)
    assert {path.name for path in folder.iterdir()} == set(binaries.CLUSTER)
    assert not binaries.cache_directory().exists()


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("kube-apiserver", "Kubernetes v1.30.2"),
        ("etcd", "etcd Version: 3.4.23"),
        ("helm", "v4.0.1+g12"),
        ("kwok", "no version"),
    ],
)
def test_other_version_is_refused_with_a_reason(places, name, printed, capsys):
    old = create_program(places / "path", name, printed)
    fitting, (refusal,) = machine.programs([name])
    assert fitting == {}
    assert str(old) in refusal
    assert "is needed" in refusal
    folder = machine.directory([name])
    assert folder == binaries.cache_directory()
    assert refusal in capsys.readouterr().err


def test_failing_program_is_refused(places):
    create_program(places / "path", "kwok").write_text("#!/bin/sh\necho v0.8.0\nexit 1\n")
    assert machine.programs(["kwok"])[0] == {}


def test_tests_do_not_use_programs_from_path(places):
    for name in binaries.CLUSTER:
        create_program(places / "path", name)
    assert binaries.find(binaries.CLUSTER) is None
    assert binaries.directory(binaries.CLUSTER) == binaries.cache_directory()


def test_complete_cache_is_used_unchanged(places):
    folder = binaries.directory(binaries.CLUSTER)
    create_program(places / "path", "etcd")
    assert machine.directory(binaries.CLUSTER) == folder


def test_other_combination_of_programs_uses_a_separate_directory(places):
    create_program(places / "path", "helm")
    before = machine.directory(["helm", "kwok"])
    create_program(places / "assets", "helm")
    assert machine.directory(["helm", "kwok"]) != before
