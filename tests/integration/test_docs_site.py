"""The documentation site as readers see it: in Chromium, light and dark, on a desktop and on a phone."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.harness.browser import PHONE, Site, headless_browser, served_site, visit

pytestmark = pytest.mark.rotating("file")

# Relative luminance and contrast as in WCAG 2.
_CONTRAST = """
(() => {
  const channels = color => color.match(/[\\d.]+/g).slice(0, 3).map(value => value / 255)
  const linear = value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4
  const luminance = color => {
    const [red, green, blue] = channels(color).map(linear)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
  }
  window.contrast = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b)
    return (light + 0.05) / (dark + 0.05)
  }
})()
"""
# Width, height, and the least contrast of a letter with the page, of each drawing.
_DRAWINGS = """
[...document.querySelectorAll("div.mermaid")].map(drawing => {
  const svg = drawing.shadowRoot?.querySelector("svg")
  if (!svg) return null
  const {width, height} = svg.getBoundingClientRect()
  const page = getComputedStyle(document.body).backgroundColor
  const letters = [...svg.querySelectorAll("p, span, text, tspan")]
    .filter(text => text.textContent && !text.children.length)
  const ink = text => getComputedStyle(text)[text instanceof SVGElement ? "fill" : "color"]
  const [faintest, least] = letters.map(text => [text.textContent, contrast(ink(text), page)])
    .sort((one, other) => one[1] - other[1])[0]
  const is_whole = drawing.scrollWidth == drawing.clientWidth
  return {width, height, is_whole, faintest, contrast: least}
})
"""
# The width that each page needs, and its commands that are wider than their box. The content of each page
# replaces that of the open page: this is faster than a visit.
_WIDTHS = """
async paths => {
  const measured = {}
  for (const path of paths) {
    const html = await (await fetch(new URL(path, location))).text()
    const content = new DOMParser().parseFromString(html, "text/html").querySelector(".md-content")
    content.querySelectorAll("img").forEach(image => image.removeAttribute("src"))
    document.querySelector(".md-content").replaceWith(content)
    const commands = [...content.querySelectorAll(".language-sh code")]
    const cut = commands.filter(code => code.scrollWidth > code.clientWidth)
    measured[path] = [document.documentElement.scrollWidth, cut.map(code => code.textContent)]
  }
  return measured
}
"""


def switch_colours(page: Page) -> None:
    """Press the button for light or dark colours."""
    scheme = page.locator("body").get_attribute("data-md-color-scheme") or ""
    page.locator("label.md-header__button[title$=colours]:visible").click()
    expect(page.locator("body")).not_to_have_attribute("data-md-color-scheme", scheme)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless_browser() as started:
        yield started


@pytest.fixture(scope="module")
def site(browser, tmp_path_factory) -> Iterator[Site]:
    with served_site(tmp_path_factory.mktemp("site")) as served:
        yield served


def test_every_diagram_is_drawn_and_legible(browser, site):
    pages = {page: site.html(page).count('class="mermaid"') for page in site.pages}
    pages = {page: count for page, count in pages.items() if count}
    assert len(pages) > 5
    with visit(browser, site) as opened:
        for path, count in pages.items():
            opened.open(path)
            expect(opened.page.locator("div.mermaid svg")).to_have_count(count)
            opened.page.evaluate(_CONTRAST)
            for _ in range(2):  # light and dark; the site remembers the last choice
                for drawing in opened.page.evaluate(_DRAWINGS):
                    assert min(drawing["width"], drawing["height"]) > 60, (path, drawing)
                    assert drawing["is_whole"], (path, drawing)  # nothing to scroll on a desktop
                    assert drawing["contrast"] >= 4.5, (path, drawing)
                switch_colours(opened.page)


def test_search_finds_the_page(browser, site):
    wanted = {
        "does the cache help": "how-to/see-whether-the-cache-helps/",
        "Redis is down": "operations/faq/#what-happens-if-redis-is-down",
        "size memory": "how-to/size-tiers/",
        "chunk key": "concepts/prompt/#chunks-and-keys",
        "add a lower tier": "how-to/add-a-disk-tier/",
        "no gpu": "how-to/run-without-a-gpu/",
        "without GPU": "how-to/run-without-a-gpu/",
        "uninstall": "how-to/uninstall/",
    }
    with visit(browser, site) as opened:
        opened.open("")
        field = opened.page.locator(".md-search__input")
        for term, path in wanted.items():
            field.fill(term)
            field.press("End")  # the search listens to keys
            page, _, anchor = path.partition("#")
            first = opened.page.locator(".md-search-result__item").filter(visible=True).first
            link = first.locator(".md-search-result__link").first
            expect(link).to_have_attribute("href", re.compile(re.escape(site.url + page) + r"\?h="))
            expect(first.locator(f"a[href$='#{anchor}']" if anchor else "a").first).to_be_attached()
        link.click()
        expect(opened.page.locator("h1")).to_contain_text("Uninstall")


def test_no_page_and_no_command_scrolls_sideways_on_a_phone(browser, site):
    with visit(browser, site, viewport=PHONE) as opened:
        opened.open("")
        assert opened.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        expected = {path: [PHONE["width"], []] for path in site.pages}
        assert opened.page.evaluate(_WIDTHS, site.pages) == expected
