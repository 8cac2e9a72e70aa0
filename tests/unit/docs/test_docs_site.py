"""The hook of the documentation site, which converts links and lists from GitHub's Markdown to MkDocs'."""

import pytest

from tools.docs_site import with_markdown_lists, with_site_links

REPOSITORY = "https://example.com/repository"
PAGES = {"index.md", "guides/sidecar.md", "runbooks/README.md", "ARCHITECTURE.md", "SECURITY.md"}


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
