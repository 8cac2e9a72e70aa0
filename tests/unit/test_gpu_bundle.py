"""The bundle for GPU machines: lists of packages, archives and the limit of its size."""

import ast
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from testing.child_process import REPOSITORY
from tools.gpu_bundle import __main__ as bundle
from tools.gpu_bundle import archive, lists, redis_server

RUN_ON_GPU_MACHINES = (
    "benchmarks/gpu",
    "sidecar/lmcache_sidecar",
    "sidecar/lmcache_store",
    "tests/gpu",
    "tests/integration/test_sidecar_copies.py",
    "tests/integration/test_sidecar_copy_faults.py",
)
FROM_THE_MACHINE = frozenset(("torch", "transformers", "vllm"))
"""Packages that no list of the project has. The steps that need one say so."""
OPTIONAL = frozenset(("hypothesis",))
"""Packages whose absence the importing module expects."""
DISTRIBUTIONS = {
    "cuda": "cuda-bindings",
    "google": "protobuf",
    "grpc": "grpcio",
    "prometheus_client": "prometheus-client",
    "yaml": "pyyaml",
}
FOLDERS = (REPOSITORY, REPOSITORY / "sidecar", REPOSITORY / "operator")
OUR_PACKAGES = {path.name for folder in FOLDERS for path in folder.iterdir() if path.is_dir()}


def imports(path: Path) -> set[str]:
    """Return the absolute names that a module imports when it is imported itself."""
    names = set()
    for node in at_import(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        else:
            assert not node.level, f"{path} has a relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def at_import(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_import(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from at_import(node.body)
            yield from at_import(getattr(node, "orelse", []))


@cache
def files_of(name: str) -> tuple[Path, ...]:
    """Return the project's files that an import of this name runs."""
    parts, paths = name.split("."), []
    for end in range(1, len(parts) + 1):
        for folder in FOLDERS:
            base = folder.joinpath(*parts[:end])
            paths += [path for path in (base / "__init__.py", base.with_suffix(".py")) if path.exists()]
    return tuple(paths)


def imported_packages() -> dict[str, Path]:
    """Return the third-party packages that the checks import, each with a file that imports it."""
    pending = [REPOSITORY / "tests" / "conftest.py"]
    for root in RUN_ON_GPU_MACHINES:
        path = REPOSITORY / root
        pending += sorted(path.rglob("*.py")) if path.is_dir() else [path, path.parent / "conftest.py"]
    plugins = re.findall(r'"(tests\.harness\.\w+)"', pending[0].read_text())
    pending += [path for plugin in plugins for path in files_of(plugin)]
    known, packages = set(pending), {}
    while pending:
        path = pending.pop()
        for name in imports(path):
            package = name.partition(".")[0]
            if package not in OUR_PACKAGES:
                packages.setdefault(package, path)
                continue
            new = set(files_of(name)) - known
            known |= new
            pending += new
    return {name: path for name, path in packages.items() if name not in sys.stdlib_module_names}


def test_every_package_that_the_checks_import_is_in_the_list():
    listed = {package.name for package in lists.requirements(lists.PROJECT)}
    imported = {DISTRIBUTIONS.get(name, name): path for name, path in imported_packages().items()}
    assert {"grpcio", "numpy", "pytest", "redis", "torch", "transformers"} <= set(imported)
    missing = {
        name: path for name, path in imported.items() if name not in listed | FROM_THE_MACHINE | OPTIONAL
    }
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


def test_vllm_has_a_version():
    assert re.fullmatch(r"0\.\d+\.\d+", lists.vllm().version)


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


def test_bundle_without_an_engine(pack):
    status, names = pack()
    assert status == 0
    assert names == {"packages.tar.xz", "python", "commit", "expected", "run.sh", "environment.py"}


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
