"""Second attempts of failed tests: which tests get one, and with which fixtures."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

FIXTURES = """
import pytest

opened = []

@pytest.fixture(scope="session")
def session():
    opened.append("session")
    yield len(opened)
    opened.append("session closed")

@pytest.fixture(scope="module")
def module(session):
    opened.append("module")
    yield len(opened)
    opened.append("module closed")
"""


@pytest.fixture
def run(pytester):
    def run_test(folder: str, body: str):
        pytester.mkpydir(folder).joinpath("test_sample.py").write_text(FIXTURES + body)
        options = (
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--import-mode=importlib",
            "--max-suite-reruns=5",
        )
        return pytester.runpytest_inprocess("-p", "tests.harness.second_attempts", *options)

    return run_test


def test_a_second_attempt_gets_new_fixtures_except_for_those_of_the_session(run):
    test = (
        "def test_first(module):\n"
        "    expected = ['session', 'module', 'module closed', 'module']\n"
        "    assert opened == expected\n"
        "def test_next(module):\n"
        "    assert opened == ['session', 'module', 'module closed', 'module']\n"
    )
    outcomes = run("integration", test).parseoutcomes()
    assert outcomes == {"passed": 2, "rerun": 1}


def test_fixtures_are_closed_once_when_the_last_test_fails_twice(run, pytester):
    closing = (
        "@pytest.fixture(scope='module')\n"
        "def server():\n    yield\n    open('closed', 'a').write('once ')\n"
        "def test_last(server):\n    assert False\n"
    )
    assert run("e2e", closing).parseoutcomes() == {"failed": 1, "rerun": 1}
    assert pytester.path.joinpath("closed").read_text() == "once once ", "one for each attempt"


def test_a_failed_setup_of_the_module_is_tried_again(run):
    test = (
        "@pytest.fixture(scope='module')\n"
        "def server():\n    opened.append('try')\n    assert len(opened) == 2\n"
        "def test_server(server):\n    pass\n"
    )
    assert run("integration", test).parseoutcomes() == {"passed": 1, "rerun": 1}


def test_unit_tests_have_one_attempt(run):
    assert run("unit", "def test_fails(module):\n    assert False\n").parseoutcomes() == {"failed": 1}
