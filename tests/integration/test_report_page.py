"""The page of ``kubectl lmcache report`` in Chromium, opened as a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_operator.commands.reports.page import page as rendered

from tests.harness.browser import DARK, DESKTOP, LIGHT, headless_browser
from tests.harness.reports import REASON, facts, pod

PHONE = {"width": 400, "height": 800}
TEXTS = ("The cache served 70 %", "What to do", "The last 24h", REASON, "RemoteTierSlow", "qwen3-8b-engine-1")
INVISIBLE = """
() => [...document.querySelectorAll("h1, h2, h3, p, li, th, td, svg text, summary")].filter(element => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true})
  const channels = color => { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data] }
  const luminance = color => { const [r, g, b] = channels(color).map(value => { value /= 255;
    return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4 });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b }
  const style = getComputedStyle(element)
  let box = element
  while (box && getComputedStyle(box).backgroundColor === "rgba(0, 0, 0, 0)") box = box.parentElement
  const ink = luminance(element.tagName === "text" ? style.fill : style.color)
  const ground = luminance(box ? getComputedStyle(box).backgroundColor : "white")
  const contrast = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05)
  return element.textContent.trim() && style.display !== "none" && contrast < 3
}).map(element => element.textContent)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with headless_browser() as started:
        yield started


@pytest.fixture
def report(tmp_path: Path) -> Path:
    file = tmp_path / "report.html"
    file.write_text(rendered(facts()), encoding="utf-8")
    return file


def opened(browser: Any, file: Path, problems: list[str], **options: Any) -> Any:
    page = browser.new_context(**options).new_page()
    page.on("request", lambda sent: sent.url.startswith(("file:", "data:")) or problems.append(sent.url))
    page.on("console", lambda line: problems.append(line.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    page.goto(file.as_uri())
    return page


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_page_is_readable_and_asks_no_network(browser, report, viewport, scheme) -> None:
    problems: list[str] = []
    page = opened(browser, report, problems, viewport=viewport, color_scheme=scheme)
    for text in TEXTS:
        assert page.get_by_text(text).first.is_visible(), text
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert page.evaluate(INVISIBLE) == []
    boxes = [picture.bounding_box() for picture in page.locator("svg").all()]
    assert len(boxes) == 6
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= viewport["width"] for box in boxes)
    page.context.close()
    assert problems == []


def test_long_names_do_not_widen_the_page(browser, tmp_path) -> None:
    file, problems = tmp_path / "report.html", []
    long_facts = facts()
    long_facts.cluster["metadata"]["name"] = "n" * 253
    long_facts.cluster["spec"]["model"]["name"] = "m" * 512
    long_facts = facts(
        gathered=long_facts.gathered.__class__(long_facts.cluster, (pod("p" * 253),), ("x" * 400,))
    )
    file.write_text(rendered(long_facts), encoding="utf-8")
    page = opened(browser, file, problems, viewport=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.context.close()
    assert problems == []


def test_texts_of_pods_run_no_script(browser, tmp_path) -> None:
    file, problems = tmp_path / "report.html", []
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)><svg onload=alert(3)>"
    evil_facts = facts(problems=[evil], since=evil, version=evil)
    evil_facts.cluster["spec"]["model"]["name"] = evil
    file.write_text(rendered(evil_facts), encoding="utf-8")
    page = opened(browser, file, problems)
    assert page.get_by_text(evil).first.is_visible()
    page.context.close()
    assert problems == []


def test_policy_of_the_page_stops_a_script(browser, report) -> None:
    """The page stays harmless even if a text were not escaped."""
    report.write_text(report.read_text().replace("<main>", "<main><script>alert(1)</script>"))
    problems: list[str] = []
    page = opened(browser, report, problems)
    page.context.close()
    assert len(problems) == 1
    assert "Content Security Policy" in problems[0]


def test_page_prints_on_white_paper(browser, report) -> None:
    page = opened(browser, report, [], color_scheme=DARK)
    page.emulate_media(media="print", color_scheme=DARK)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate(INVISIBLE) == []
    assert page.pdf().startswith(b"%PDF")
    page.context.close()
