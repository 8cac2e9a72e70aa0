"""Modules whose docstring says that they are pure have a contract of import-linter that enforces it."""

import ast
import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "lmcache",
    "operator/lmcache_cli",
    "sidecar/lmcache_store",
    "sidecar/lmcache_client",
    "sidecar/lmcache_sidecar",
    "operator/lmcache_operator",
)


def pure_modules() -> list[str]:
    """Modules whose docstring contains the word Pure."""
    modules = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if re.search(r"\bPure\b(?! but)", ast.get_docstring(ast.parse(path.read_text())) or ""):
                parts = path.relative_to((ROOT / package).parent).with_suffix("").parts
                modules.append(".".join(part for part in parts if part != "__init__"))
    return modules


def test_pure_modules_have_a_contract() -> None:
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    enforced = {
        module
        for contract in contracts.values()
        if {"socket", "threading", "os"} <= set(contract.get("forbidden_modules", "").split())
        for module in contract["source_modules"].split()
    }
    modules = pure_modules()
    assert "lmcache_store.tiers.policy" in modules
    missing = [
        name for name in modules if not any(f"{name}.".startswith(f"{prefix}.") for prefix in enforced)
    ]
    assert not missing
