"""The hook of the site, which converts links, lists and boxes from GitHub's Markdown to MkDocs'.

Also the sentences about the project's state, which one page has and the others link to.
"""

import re

import pytest

from testing.child_process import REPOSITORY as ROOT
from tests.harness.fences import DOCS, pages
from tools.docs_site import with_boxes, with_markdown_lists, with_site_links

REPOSITORY = "https://example.com/repository"
PAGES = {"index.md", "guides/sidecar.md", "runbooks/README.md", "ARCHITECTURE.md", "SECURITY.md"}
STATE = DOCS / "operations" / "state.md"
COMPARED = {
    DOCS / "comparison.md",
    *(DOCS / "adr").iterdir(),
}  # tables of cells, and the state of a former day
PAGES_OF_SITE = [*({*pages()} - COMPARED), ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("guides/kubernetes.md", "sidecar.md#disk", "sidecar.md#disk"),
        ("guides/kubernetes.md", "../runbooks/", "../runbooks/README.md"),
        ("guides/kubernetes.md", "../../ARCHITECTURE.md", "../ARCHITECTURE.md"),
        ("guides/kubernetes.md", "../../examples/cpu.yaml", f"{REPOSITORY}/blob/main/examples/cpu.yaml"),
        ("guides/kubernetes.md", "../../README.md#install", f"{REPOSITORY}/blob/main/README.md#install"),
        ("guides/kubernetes.md", "../../examples", f"{REPOSITORY}/tree/main/examples"),
        ("ARCHITECTURE.md", "docs/guides/sidecar.md", "guides/sidecar.md"),
        ("ARCHITECTURE.md", "SECURITY.md", "SECURITY.md"),
        ("index.md", "../SECURITY.md", "SECURITY.md"),
        ("index.md", "guides/missing.md", "guides/missing.md"),
        ("index.md", "https://example.com/x.md", "https://example.com/x.md"),
    ],
)
def test_links_are_converted_for_the_site(page, link, expected):
    assert with_site_links(f"[text]({link})", page, PAGES, REPOSITORY) == f"[text]({expected})"


@pytest.mark.parametrize("code", ["`[a](../../README.md)`", "```sh\n[a](../../README.md)\n```"])
def test_links_in_code_are_not_converted(code):
    assert with_site_links(code, "guides/kubernetes.md", PAGES, REPOSITORY) == code


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("You need:\n- a\n- b", "You need:\n\n-   a\n-   b\n"),
        ("- a\n  b\n\n  c", "-   a\n    b\n\n    c\n"),
        ("1. a:\n   - b\n2. c", "1.  a:\n    -   b\n2.  c\n"),
        (
            "1. a:\n   ```sh\n   x\n     y\n   ```\n2. c",
            "1.  a:\n\n    ```sh\n    x\n      y\n    ```\n\n2.  c\n",
        ),
        ("- a\n\n  text\n- b", "-   a\n\n    text\n\n-   b\n"),
        ("1. a\n\n   - b\n2. c", "1.  a\n\n    -   b\n\n2.  c\n"),
        ("```\n- a\n```", "```\n- a\n```\n\n"),
        (r"| `a \| b` |", "| `a | b` |\n"),
    ],
)
def test_lists_are_converted_for_the_site(markdown, expected):
    assert with_markdown_lists(markdown) == expected


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("> [!NOTE]\n> a\n> b\n\nc", "!!! note\n\n    a\n    b\n\n\nc"),
        ("> [!WARNING]\n> You need:\n> - a\n", "!!! warning\n\n    You need:\n\n    -   a\n\n"),
        ("1.  a\n\n    > [!TIP]\n    > b\n", "1.  a\n\n    !!! tip\n\n        b\n\n"),
        ("> a quotation", "> a quotation"),
    ],
)
def test_boxes_are_converted_for_the_site(markdown, expected):
    assert with_boxes(markdown) == expected


def test_only_boxes_of_the_theme_are_used():
    kinds = {
        kind for page in PAGES_OF_SITE for kind in re.findall(r"^ *> \[!(\w+)\]", page.read_text(), re.M)
    }
    assert kinds <= {"NOTE", "TIP", "WARNING"}
    assert "WARNING" in kinds


@pytest.mark.parametrize(
    "sentence",
    [
        r"(no release|no image|nothing) is published",
        r"not (yet )?verified on a (real )?GPU|on a (real )?GPU are not yet",
    ],
)
def test_one_page_says_the_state_and_others_link_to_it(sentence):
    link = re.compile(r"\[[^\]]*\]\([^)]*\bstate\.md#[^)]*\)")
    texts = {page: re.sub(r"\s+", " ", link.sub("", page.read_text())) for page in PAGES_OF_SITE}
    assert [page for page, text in texts.items() if re.search(sentence, text, re.I)] == [STATE]
