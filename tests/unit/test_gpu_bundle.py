"""The bundle for GPU machines: lists of packages, archives and the limit of its size."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import grimp
import pytest

from tests import conftest
from tools.changed_tests import PACKAGES
from tools.gpu_bundle import __main__ as bundle
from tools.gpu_bundle import archive, lists, redis_server

RUN_ON_GPU_MACHINES = (
    "benchmarks.gpu",
    "lmcache_sidecar",
    "lmcache_store",
    "tests.conftest",
    "tests.gpu",
    "tests.integration.conftest",
    "tests.integration.test_sidecar_copies",
    "tests.integration.test_sidecar_copy_faults",
)
FROM_THE_MACHINE = frozenset(("torch", "transformers", "vllm", "zmq"))
"""Packages that no list of the project has. The steps that need one say so. zmq comes with vLLM."""
OPTIONAL = frozenset((
    "huggingface_hub", "hypothesis", "llvmlite", "opentelemetry", "pythonjsonlogger", "tokenizers",
))  # fmt: skip
"""Packages whose absence the importing module expects, or that it imports for what no check does."""
DISTRIBUTIONS = {
    "cuda": "cuda-bindings",
    "google": "protobuf",
    "grpc": "grpcio",
    "prometheus_client": "prometheus-client",
    "xdist": "pytest-xdist",
    "yaml": "pyyaml",
}


def imported_packages() -> dict[str, set[str]]:
    """Return the third-party packages that the checks import, each with the modules that import it."""
    graph = grimp.build_graph(*PACKAGES, include_external_packages=True)
    modules = {*RUN_ON_GPU_MACHINES, *conftest.pytest_plugins}.intersection(graph.modules)
    modules |= {below for module in modules for below in graph.find_descendants(module)}
    modules |= {imported for module in modules for imported in graph.find_upstream_modules(module)}
    packages = {name for name in modules - sys.stdlib_module_names if graph.is_module_squashed(name)}
    return {name: modules & graph.find_modules_that_directly_import(name) for name in packages}


def test_every_package_that_the_checks_import_is_in_the_list():
    listed = {package.name for package in lists.requirements(lists.PROJECT)}
    imported = {DISTRIBUTIONS.get(name, name): modules for name, modules in imported_packages().items()}
    assert {"grpcio", "numpy", "pytest", "redis", "torch", "transformers"} <= set(imported)
    known = listed | FROM_THE_MACHINE | OPTIONAL
    missing = {name: modules for name, modules in imported.items() if name not in known}
    assert not missing, "add these packages to tools/pins.sh, and run `make pins`"


def test_plugins_that_pytest_needs_are_in_the_list():
    """Without pytest-timeout, the setting ``timeout`` is an error: pytest runs with --strict-config."""
    listed = {package.name for package in lists.requirements(lists.PROJECT)}
    assert {"pytest", "pytest-timeout", "pytest-xdist"} <= listed


@pytest.mark.parametrize("path", [lists.PROJECT, lists.TRANSFORMERS, lists.VLLM], ids=lambda path: path.name)
def test_lists_have_versions_and_hashes(path):
    packages = lists.requirements(path)
    assert len({package.name for package in packages}) == len(packages) > 20
    assert all("--hash=sha256:" in package.text for package in packages)


def test_packages_are_divided_between_bundle_and_machine(tmp_path):
    machine = lists.installed(lists.MACHINE)
    small, large = (lists.choose(machine, with_vllm=with_vllm) for with_vllm in (False, True))
    assert {"redis", "cryptography"} <= {package.name for package in small.packed}
    assert {"torch", "transformers", "grpcio"} <= set(small.expected)
    assert {"openai", "cachetools"} <= {package.name for package in large.packed}
    assert "vllm" not in {package.name for package in large.packed}
    for choice in (small, large):
        assert not {package.name for package in choice.packed} & (set(choice.expected) | machine)
    empty = lists.choose(frozenset(), with_vllm=True)
    assert empty.expected == ["torch"]
    assert {"tokenizers", "numpy"} <= {package.name for package in empty.packed}
    assert len({package.name for package in empty.packed}) == len(empty.packed)


def test_output_of_pip_freeze_is_a_list_of_installed_packages(tmp_path):
    path = tmp_path / "machine.txt"
    path.write_text(
        "# comment\nTorch==2.11.0+cu130\ntyping_extensions==4.16.0\n-e git+https://example.org/x#egg=x\n"
        "numpy @ file:///build/numpy.whl\n\nruamel.yaml==1  # comment\n"
    )
    assert lists.installed(path) == {"torch", "typing-extensions", "numpy", "ruamel-yaml"}


def test_requirements_without_a_version_are_refused(tmp_path):
    path = tmp_path / "needed.txt"
    path.write_text("redis==1 \\\n    --hash=sha256:00\nnumpy>=2\n")
    with pytest.raises(ValueError, match=r"'numpy>=2' is not NAME==VERSION"):
        lists.requirements(path)


def test_archives_depend_on_names_and_contents_only(tmp_path):
    written = []
    for number, mode in enumerate((0o600, 0o644)):
        folder = tmp_path / str(number)
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "__pycache__" / "a.pyc").touch()
        (folder / "a.py").write_text("text")
        (folder / "a.py").chmod(mode)
        os.utime(folder / "a.py", (number, number))
        archive.write(folder, path := tmp_path / f"{number}.tar.xz")
        written.append(path.read_bytes())
    assert written[0] == written[1]
    with tarfile.open(tmp_path / "0.tar.xz") as file:
        assert [(entry.name, entry.mode) for entry in file] == [("a.py", 0o644)]


def test_libraries_of_libc_are_not_packed():
    ldd = """
        linux-vdso.so.1 (0x00007fa21832d000)
        libjemalloc.so.2 => /lib/x86_64-linux-gnu/libjemalloc.so.2 (0x00007fa217c00000)
        libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007fa217f20000)
        libmissing.so.1 => not paths
        /lib64/ld-linux-x86-64.so.2 (0x00007fa21832f000)
    """
    assert redis_server.libraries(ldd) == [Path("/lib/x86_64-linux-gnu/libjemalloc.so.2")]


@pytest.mark.redis
def test_packed_redis_server_runs_from_any_folder(tmp_path):
    assert redis_server.pack(tmp_path / "packed")
    moved = (tmp_path / "packed").rename(tmp_path / "moved")
    link = tmp_path / "redis-server"
    link.symlink_to(moved / "redis-server")
    done = subprocess.run([link, "--version"], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Redis server v=")


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """Pack without downloads. Returns the exit status and the names of the bundle's files."""

    def fake_archive(*_: object) -> Path:
        (path := tmp_path / "archive").write_bytes(bytes(1000))
        return path

    def pack(*arguments: str) -> tuple[int, set[str]]:
        output = tmp_path / "bundle"
        monkeypatch.setattr(bundle, "_cached_archive", fake_archive)
        monkeypatch.setattr(redis_server, "pack", lambda _: False)
        monkeypatch.setattr(sys, "argv", ["gpu_bundle", "--output", str(output), *arguments])
        return bundle.main(), {path.name for path in output.iterdir()}

    return pack


def test_bundle_with_an_engine(pack, tmp_path, capsys):
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "old").touch()
    status, names = pack("--engine", "vllm", "--python", "3.13")
    assert status == 0
    assert "engine.tar.xz" in names
    assert "old" not in names
    assert (tmp_path / "bundle" / "python").read_text() == "3.13\n"
    assert "redis-server is missing" in capsys.readouterr().out


def test_a_bundle_that_is_too_large_is_reported(pack, monkeypatch, capsys):
    monkeypatch.setattr(bundle, "MAX_BYTES", 1000)
    status, _ = pack()
    assert status == 1
    assert "too large" in capsys.readouterr().out
