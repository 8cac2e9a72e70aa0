"""The programs in the library's guide run, and print what the guide says."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "library.md"


def test_the_guide_s_programs_run(capsys):
    first, second = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(first, names)
    assert capsys.readouterr().out.split() == ["1000", "768", "True"]
    exec(second, names)
    assert capsys.readouterr().out.split() == ["True", "300"]
