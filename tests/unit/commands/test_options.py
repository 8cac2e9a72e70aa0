"""Options that several commands share, and what the command lines of all programs have in common."""

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

import lmcache.server.__main__ as lm_server
import lmcache_operator.__main__ as operator
from lmcache_cli.__main__ import _parser, main
from lmcache_cli.commands import COMMANDS
from lmcache_sidecar import command as sidecar

PROGRAMS = (_parser([*COMMANDS]), operator._parser(), sidecar._parser("top"), lm_server._parser())


def with_commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a program and its commands."""
    yield parser
    for group in filter(None, [parser._subparsers]):
        [commands] = group._group_actions
        yield from dict(commands.choices or {}).values()


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


def test_no_command_prints_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert all(f"\n    {name} " in shown for name in COMMANDS)


def mistake(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the last line that a wrong command line prints."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["statsu"], "did you mean 'status'?"),
        (
            ["status", "--conetxt", "prod"],
            "status: error: argument --conetxt is unknown; did you mean '--context'?",
        ),
        (["status", "-o", "jsn"], "did you mean 'json'?"),
        (["top", "--sort=tokns", "--once"], "did you mean 'tokens'?"),
        (["status", "--strict"], "argument --strict is unknown"),  # an option of another command
        (["status", "--names", "team"], "argument --names is unknown; did you mean '--namespace'?"),
        (["render", "--filename", "x", "--sidecar-imag=S3cr3t"], "did you mean '--sidecar-image'?"),
        (["status", "one", "two"], "too many arguments"),
    ],
    ids=str,
)
def test_mistyped_word_gets_a_suggestion(words, sentence, capsys) -> None:
    line = mistake(capsys, *words)
    assert sentence in line
    assert "S3cr3t" not in line
    assert ("did you mean" in line) == ("did you mean" in sentence)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.prog)
def test_no_program_takes_a_part_of_an_option(program: argparse.ArgumentParser) -> None:
    assert not any(parser.allow_abbrev for parser in with_commands(program))


@pytest.mark.parametrize(
    ("program", "command"),
    [(program, command) for program in PROGRAMS for command in with_commands(program)],
    ids=lambda parser: parser.prog,
)
def test_each_help_has_examples_that_the_program_takes(program, command) -> None:
    examples = re.findall(
        rf"^ +{command.prog} (.*)$", command.format_help().partition("examples:")[2], re.MULTILINE
    )
    assert examples
    named = shlex.split(command.prog.removeprefix(program.prog))
    for example in examples:
        words = [*named, *shlex.split(re.split(r" ?[|<]", example)[0])]
        _, unknown = program.parse_known_args(words)
        assert not unknown
