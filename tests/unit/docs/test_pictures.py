"""Pictures of the documentation: they show what commands print and what dashboards contain."""

import html
import json
import re

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from tests.harness.fences import DOCS, pages
from tools.pictures import BOARDS, RECORDING, drawing, panels, terminal
from tools.pictures.boards import load

MAX_BYTES = 150_000
_TEXT = re.compile(r'<text class="[\w-]+-r\d+" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')
_COLUMN = 12.2
"""Width of a letter."""
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture(scope="module")
def pictures():
    return drawing.render()


def text_of(svg):
    """The lines of a picture of a terminal that are not empty."""
    lines: dict[str, str] = {}
    for x, y, part in _TEXT.findall(svg):
        line = lines.get(y, "").ljust(round(float(x) / _COLUMN))
        lines[y] = line + html.unescape(part).replace("\xa0", " ")
    return [line.rstrip() for line in lines.values() if line.strip()]


def test_pictures_of_commands_show_what_they_print(pictures):
    for name, lines in drawing.printed(drawing.gathered(json.loads(RECORDING.read_text()))).items():
        expected = [f"$ kubectl lmcache {name} chat", *(_COLOURS.sub("", line) for line in lines)]
        assert text_of(pictures[f"{name}.svg"]) == [line.rstrip() for line in expected if line]


def test_pictures_have_the_colours_of_a_command():
    svg = terminal.drawn("kubectl lmcache status demo", ["\x1b[32mReady\x1b[0m <&>  3 %"])
    assert text_of(svg) == ["$ kubectl lmcache status demo", "Ready <&>  3 %"]
    assert len(set(re.findall(r"fill: (#\w+)", svg))) > 1


@pytest.mark.parametrize("name", BOARDS)
def test_pictures_of_dashboards_have_the_titles_and_series_of_their_panels(pictures, name):
    answers = json.loads(RECORDING.read_text())["series"]
    svg, board = html.unescape(pictures[f"{name}.svg"]), load(name)
    shown = board.first(BOARDS[name])
    assert len(shown) > 5
    for panel in shown:
        assert f">{panel.title}<" in svg
        series = [(target["refId"], each["labels"]) for target in panel.targets
                  for each in answers[f"{name}/{panel.title}/{target['refId']}"]]  # fmt: skip
        assert series, f"{panel.title} shows nothing"
        for letter, labels in series:
            assert f">{panel.legend(letter, labels)}<" in svg or panel.kind == "stat"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.456, "percentunit", "45.6%"),
        (2.5, "currencyUSD", "$2.50"),
        (0.0123, "s", "12.3 ms"),
        (12.3, "s", "12.3 s"),
        (3 << 20, "bytes", "3 MiB"),
        (0, "Bps", "0 B/s"),
        (2.5e6, "Bps", "2.5 MB/s"),
        (1234, "short", "1.23 k"),
        (7, "short", "7"),
    ],
)
def test_values_are_written_as_in_grafana(value, unit, text):
    assert panels.formatted(value, unit) == text


def test_pictures_are_small_and_load_nothing(pictures):
    for name, svg in pictures.items():
        assert len(svg) < MAX_BYTES, name
        assert not re.search(r"(?:src|href|url\()\s*=?[\"'(]?\s*(?:https?:)?//", svg), name


def test_pages_show_every_picture_with_a_description(pictures):
    shown = re.findall(
        r"!\[([^\]]*)\]\([^)]*pictures/([\w-]+\.svg)\)", "\n".join(page.read_text() for page in pages())
    )
    assert (
        {name for _, name in shown} == {path.name for path in (DOCS / "pictures").iterdir()} == set(pictures)
    )
    assert [name for about, name in shown if len(about.split()) < 8] == []
