"""A pytest plugin: in the environment of ``make setup-light``, tests that need more are skipped.

That environment has no torch, no vLLM and no servers. A test that imports a missing package or starts a
missing program is skipped. In the complete environment, the same error fails the test.
"""

import sys
from collections.abc import Generator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

PACKAGES = frozenset((
    "cbor2", "fastapi", "opentelemetry", "safetensors", "tokenizers", "torch", "transformers", "vllm",
))  # fmt: skip
"""Packages of the complete environment that tests import. The product works without the others."""
PROGRAMS = frozenset(("c++", "openssl", "promtool", "redis-cli", "redis-server"))
IS_LIGHT = Path(sys.prefix, ".setup-light-stamp").exists()
"""Whether ``make setup-light`` created the environment, and not ``make setup``."""


class MissingPackages(MetaPathFinder):
    """The last finder of modules: it skips a test module or a test that imports a missing package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Skip the test that imports ``fullname``, if it is one of ``PACKAGES``."""
        if fullname in PACKAGES:
            pytest.skip(reason(fullname), allow_module_level=True)
        return None


class MissingPrograms:
    """Skips a test that starts a missing program."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        """Skip a test whose fixture starts a missing program."""
        return (yield from self._skipping())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Skip a test that starts a missing program."""
        return (yield from self._skipping())

    @staticmethod
    def _skipping() -> Generator[None, object, object]:
        try:
            return (yield)
        except FileNotFoundError as error:
            if error.filename not in PROGRAMS:
                raise
            pytest.skip(reason(error.filename))


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test whose child process imports a package that the light environment does not have."""
    return pytest.mark.skipif(IS_LIGHT, reason=reason(name))


def reason(name: str) -> str:
    """Return why a test is skipped."""
    return f"needs {name}, which `make setup` installs"


def pytest_configure(config: pytest.Config) -> None:
    """Skip tests in the light environment only."""
    if IS_LIGHT:
        sys.meta_path.append(MissingPackages())
        config.pluginmanager.register(MissingPrograms(), "missing-programs")
