"""Choose the tests that a change may break: ``make test-changed``.

    python -m tools.changed_tests [BASE]   # print the test files, and on stderr why each was chosen
    python -m tools.changed_tests --docs   # succeed if this branch may break the tests of the documentation

A change is the difference between the working tree and the commit BASE, by default the last commit. Four
rules choose test files:

1. the changed test files, and the unit tests next to a changed ``conftest.py``
2. unit tests that import a changed module, also through other modules
3. the tests in ``PROCESSES``: code that a test starts as a process is not among its imports
4. the ``MAX_INTEGRATION`` integration tests whose imports lead to a changed module in the fewest steps. Most
   of them reach the storage core, and together they take as long as ``make test``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import grimp
from grimp.exceptions import SourceSyntaxError

from tools.commits import default_base
from tools.sources import ROOT

PACKAGES = (
    "lmcache", "lmcache_store", "lmcache_client", "lmcache_sidecar", "lmcache_operator", "lmcache_cli",
    "testing", "tools", "benchmarks", "demo", "tests",
)  # fmt: skip
MAX_INTEGRATION = 4
PROCESSES = {
    "charts/": ("unit/chart/*", "integration/test_chart*"),
    "crds/": ("unit/chart/*", "integration/test_operator_admission"),
    "docs/": ("unit/docs/*", "integration/test_docs_yaml"),
    "examples/": ("integration/test_examples", "integration/test_docs_yaml"),
    "sidecar/lmcache_client/core/": ("integration/test_vllm",),
    "sidecar/lmcache_client/sglang/": ("integration/test_sglang",),
    "sidecar/lmcache_client/vllm/": ("integration/test_vllm",),
    "sidecar/lmcache_client/rpc/": ("integration/test_sidecar_data",),
    "sidecar/lmcache_store/tiers/disk/": ("integration/test_sidecar_disk",),
    "sidecar/lmcache_store/tiers/peers/": ("integration/test_peers",),
    "sidecar/lmcache_store/tiers/remote/": ("integration/test_sidecar_remote",),
    "operator/": ("integration/test_operator",),
    "operator/lmcache_operator/components/injection/": ("integration/test_injection",),
    "sidecar/lmcache_sidecar/peer_server/": ("integration/test_peers",),
    "sidecar/lmcache_sidecar/": ("integration/test_sidecar_data", "integration/test_sidecar_process"),
    ".github/": ("unit/images/*",),
    "Makefile": ("unit/images/test_workflows",),
    "tools/": ("unit/images/*",),
}
"""Test files, as globs below ``tests`` without ``.py``, for paths that begin so."""
DOCS = (
    "docs/", "charts/", "crds/", "examples/", "operator/lmcache_cli/commands/", "mkdocs.yml",
    "tools/docs", "tools/plugin.py", "tools/payload.py", "tests/harness/commands/terminal.py",
    "tests/integration/test_docs_",
)  # fmt: skip
"""Paths on which the tests of ``make test-docs`` depend begin so."""


def changed_paths(base: str, repository: Path = ROOT) -> list[str]:
    """Return the paths that differ from ``base``, with files that Git does not know yet."""
    differing = _git(repository, "diff", "--name-only", "--no-renames", base)
    return sorted({*differing, *_git(repository, "ls-files", "--others", "--exclude-standard")})


def _git(repository: Path, *arguments: str) -> list[str]:
    done = subprocess.run(["git", "-C", repository, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def module_of(path: str) -> str:
    """Return the name by which Python imports a file of the repository."""
    parts = list(Path(path).with_suffix("").parts)
    return ".".join(part for part in parts[parts[0] in ("operator", "sidecar") :] if part != "__init__")


def chosen(paths: Collection[str], graph: grimp.ImportGraph) -> tuple[dict[str, str], int]:
    """Return the reason for each chosen test file, and how many integration files rule 4 left out."""
    tests = {module_of(path): path for path in _test_files("*/**/test_*")}
    files = {path: "changed" for path in paths if path in tests.values()}
    for path in paths:
        globs = {
            glob: prefix for prefix in PROCESSES if path.startswith(prefix) for glob in PROCESSES[prefix]
        }
        if path.startswith("tests/unit/") and path.endswith("/conftest.py"):
            globs[f"{Path(path).parent.relative_to('tests')}/**/test_*"] = path
        for glob, reason in globs.items():
            files |= {file: f"tests {reason}" for file in _test_files(glob) if file not in files}
    distant: dict[str, tuple[int, str]] = {}
    for path in paths:
        module = module_of(path)
        if path.endswith(".py") and module in graph.modules:
            for test in graph.find_downstream_modules(module) & tests.keys():
                steps = len(graph.find_shortest_chain(test, module) or ()) - 1
                distant[tests[test]] = min((steps, module), distant.get(tests[test], (steps, module)))
    by_distance = sorted(
        (steps, file, module) for file, (steps, module) in distant.items() if file not in files
    )
    unit = [step for step in by_distance if step[1].startswith("tests/unit/")]
    integration = [step for step in by_distance if step not in unit]
    for steps, file, module in unit + integration[:MAX_INTEGRATION]:
        files[file] = f"imports {module}" + (f" in {steps} steps" if steps > 1 else "")
    return files, len(integration[MAX_INTEGRATION:])


def _test_files(glob: str) -> list[str]:
    """Return the test files of ``tests/unit`` and ``tests/integration`` that a glob names."""
    files = (path.relative_to(ROOT) for path in (ROOT / "tests").glob(f"{glob}.py"))
    return sorted(str(path) for path in files if path.parts[1] in ("unit", "integration"))


def may_break_docs(repository: Path = ROOT) -> bool:
    """Whether this branch may break the tests of the documentation.

    The answer is yes if Git does not know where the branch begins: in a shallow clone, or on the main branch.
    """
    base = default_base(repository)
    if base is None or [base] == _git(repository, "rev-parse", "HEAD"):
        return True
    return any(path.startswith(DOCS) for path in changed_paths(base, repository))


def import_graph() -> grimp.ImportGraph:
    """Return which module of the repository imports which."""
    sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "sidecar")]
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", nargs="?", default="HEAD", metavar="BASE")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    if options.docs:
        return 0 if may_break_docs() else 1
    paths = changed_paths(options.base)
    try:
        graph = import_graph()
    except SourceSyntaxError as error:
        sys.exit(str(error))
    files, num_left_out = chosen(paths, graph)
    for file, reason in sorted(files.items()):
        print(f"{file:<64} {reason}", file=sys.stderr)
    print(f"{len(paths)} changed files since {options.base}, {len(files)} test files", file=sys.stderr)
    if num_left_out:
        print(f"{num_left_out} integration files import them, too: run `make test`", file=sys.stderr)
    print(*sorted(files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
