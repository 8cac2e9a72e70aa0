"""Options that several commands share."""

import argparse

import pytest
from lmcache_operator.__main__ import _parser


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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("2h", 7200), ("1h30m", 5400), ("7d", 604_800), ("1w", 604_800)],
)
def test_logs_and_report_read_the_same_times(text: str, seconds: int) -> None:
    assert parsed("logs", f"--since={text}").since == seconds
    assert parsed("report", f"--since={text}").since == (text, seconds)


@pytest.mark.parametrize("text", ["", "soon", "5", "m", "1.5h", "-1h", "0s", "1h x", "9" * 5000 + "s", "²h"])
@pytest.mark.parametrize("command", ["logs", "report"])
def test_wrong_time_is_explained(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(command, f"--since={text}")
    assert "is not a time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "text"),
    [("since", "367d"), ("prometheus", "localhost"), ("prometheus", "http://[::1"), ("output", "report.pdf")],
)
def test_wrong_value_of_report_is_explained(option, text, capsys) -> None:
    with pytest.raises(SystemExit):
        parsed("report", f"--{option}={text}")
    assert {
        "since": f"{text!r} is not a time from 1m to 366d",
        "prometheus": f"{text!r} is not a URL such as http://localhost:9090",
        "output": f"{text!r}: the report is HTML: name a file that ends in .html",
    }[option] in capsys.readouterr().err
    assert str(parsed("report").output) == "report.html"
