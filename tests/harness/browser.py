"""The documentation site in headless Chromium: built strictly, and served on loopback."""

import functools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    ViewportSize,
    expect,
    sync_playwright,
)

from tools import debian, docs

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE = ViewportSize(width=1280, height=900), ViewportSize(width=375, height=800)
PATIENCE_MS = 60_000
"""Time that the browser has for each step. By default it has 5 s to draw a diagram or to build the index of
the search, and less than its usual share of a busy machine."""
# The theme draws diagrams into closed shadow roots, into which no test can look.
_OPEN_SHADOW_ROOTS = """
const attach = Element.prototype.attachShadow
Element.prototype.attachShadow = function (options) { return attach.call(this, {...options, mode: "open"}) }
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@dataclass(frozen=True)
class Site:
    """A built site and its address."""

    folder: Path
    url: str

    @property
    def pages(self) -> list[str]:
        """Paths of all pages, such as ``how-to/upgrade/``."""
        paths = (path.parent.relative_to(self.folder).as_posix() for path in self.folder.rglob("index.html"))
        return sorted("" if path == "." else f"{path}/" for path in paths)

    def html(self, page: str) -> str:
        """The file of a page."""
        return (self.folder / page / "index.html").read_text()


@dataclass
class Visit:
    """A page in a browser window, and what went wrong in it."""

    site: Site
    page: Page
    errors: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        """Load a page of the site."""
        self.page.goto(self.site.url + path)


def chromium() -> str:
    """The browser's command. Skips the test if the browser cannot be installed; CI fails instead."""
    installed = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if installed:
        return installed
    try:
        debian.install({CHROMIUM[0]: "chromium"})
    except debian.PackagesError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Chromium: {error}")
    return CHROMIUM[0]


@contextmanager
def served_site(folder: Path) -> Iterator[Site]:
    """Build the site into ``folder``, and serve it on a free port."""
    build = docs.command("build", "--strict", "--quiet", "--site-dir", folder)
    done = subprocess.run(build, cwd=docs.ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    handler = functools.partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="documentation site")
        thread.start()
        try:
            yield Site(folder, f"http://127.0.0.1:{server.server_port}/")
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def headless_browser() -> Iterator[Browser]:
    """Chromium without a window. Root has no other sandbox than the machine."""
    program = shutil.which(chromium())
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visit(browser: Browser, site: Site, viewport: ViewportSize = DESKTOP) -> Iterator[Visit]:
    """Open a window with nothing stored. Fails if a page asks another host, or reports an error."""
    with browser.new_context(viewport=viewport) as context:
        context.add_init_script(_OPEN_SHADOW_ROOTS)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        opened = Visit(site, page)

        def check_request(sent: Request) -> None:
            if not sent.url.startswith((site.url, "data:", "blob:")):
                opened.errors.append(f"asks {sent.url}")

        def check_line(line: ConsoleMessage) -> None:
            if line.type == "error":
                opened.errors.append(f"{page.url}: {line.text}")

        page.on("request", check_request)
        page.on("pageerror", lambda error: opened.errors.append(f"{page.url}: {error}"))
        page.on("console", check_line)
        yield opened
        assert opened.errors == []
