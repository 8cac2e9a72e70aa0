"""The environment of ``make setup-light``: tests that need more are skipped and say so."""

import sys

import pytest

from tests.harness import light

pytest_plugins = ["pytester"]

NEEDING = {
    "module": "import not_installed",
    "test": "def test(): import not_installed.part",
    "fixture": """
        import pytest
        @pytest.fixture
        def world(): import not_installed
        def test(world): pass
        """,
    "program": "def test(): import subprocess; subprocess.run(['not-installed'])",
}
FAILING = {
    "module": "import unknown",
    "test": "def test(): import unknown",
    "program": "def test(): import subprocess; subprocess.run(['unknown'])",
}


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a test file. Returns the numbers of passed, skipped and failed tests and files."""
    monkeypatch.setattr(light, "PACKAGES", {"not_installed"})
    monkeypatch.setattr(light, "PROGRAMS", {"not-installed"})

    def run(source: str, is_light: bool) -> tuple[int, ...]:
        monkeypatch.setattr(light, "IS_LIGHT", is_light)
        outside = [finder for finder in sys.meta_path if not isinstance(finder, light.MissingPackages)]
        monkeypatch.setattr(sys, "meta_path", outside)
        pytester.makepyfile(test_file=source)
        return tuple(
            map(len, pytester.inline_run("-rs", "-p", "no:rerunfailures", plugins=[light]).listoutcomes())
        )

    return run


@pytest.mark.parametrize("kind", NEEDING)
def test_skips_a_test_that_needs_more_only_in_the_light_environment(run, capsys, kind):
    assert run(NEEDING[kind], is_light=True) == (0, 1, 0)
    assert "which `make setup` installs" in capsys.readouterr().out
    assert run(NEEDING[kind], is_light=False) == (0, 0, 1)


@pytest.mark.parametrize("kind", FAILING)
def test_fails_if_anything_else_is_missing(run, kind):
    assert run(FAILING[kind], is_light=True) == (0, 0, 1)


def test_skips_a_folder_whose_conftest_needs_more(run, pytester):
    pytester.mkdir("folder").joinpath("conftest.py").write_text("import not_installed")
    (pytester.path / "folder" / "test_folder.py").write_text("def test(): pass")
    assert run("def test(): pass", is_light=True) == (1, 1, 0)
