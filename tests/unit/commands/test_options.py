"""Options that several commands share."""

import argparse

import pytest

from lmcache_cli.__main__ import _parser


def parsed(*words: str) -> argparse.Namespace:
    return _parser(words).parse_args(words)


def test_watch_can_stand_before_the_name() -> None:
    arguments = parsed("status", "--watch", "demo")
    assert (arguments.name, arguments.watch, arguments.interval) == ("demo", True, 5.0)
    assert parsed("status", "demo", "-w", "--interval", "2").interval == 2.0


@pytest.mark.parametrize("command", ["status", "top"])
@pytest.mark.parametrize("interval", ["demo", "", "nan", "0", "3601"])
def test_wrong_interval_is_explained(command: str, interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(command, f"--interval={interval}")
    assert f"{interval!r} is not a number of seconds from 1 to 3600" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "soon", "5", "m", "1.5h", "-1h", "0s", "1h x", "9" * 5000 + "s", "²h"])
def test_wrong_time_is_explained(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("report", f"--since={text}")
    assert "is not a time" in capsys.readouterr().err
