"""Programs in the library's guide: each runs separately and prints the documented output."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "guides" / "library.md").read_text()
PRINTED = {
    "engine.store(tokens, kv)": ["1000", "768", "True"],
    "FirstInFirstOut": ["[0,", "256,", "256,", "256]"],
    "CachedModel(": ["True", "300"],
    "BlendedModel(": ["420", "400"],
}


def programs(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("program", programs("python"), ids=list(PRINTED))
def test_program_of_the_guide_prints_the_documented_output(program, capsys):
    (expected_words,) = (words for mark, words in PRINTED.items() if mark in program)
    exec(program, {"__name__": "__main__"})
    assert capsys.readouterr().out.split() == expected_words


def test_commands_of_the_guide_run(tmp_path):
    for command in programs("sh"):
        python, *arguments = shlex.split(command.replace("curve.png", str(tmp_path / "curve.png")))
        assert python == "python"
        completed = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert completed.returncode == 0, completed.stderr
        assert [line.split()[0] for line in completed.stdout.splitlines()[-3:]] == ["256Gi", "1Ti", "4Ti"]
    assert (tmp_path / "curve.png").stat().st_size > 0
