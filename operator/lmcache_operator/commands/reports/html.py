"""HTML elements whose texts are escaped, so that no text of a pod can become a part of the page. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML already. Only this module and ``charts`` create it."""

    __slots__ = ()


Content = str | Iterable[str]
"""A text, or several. A text that is not `Html` is escaped."""


def element(name: str, *content: Content, **attributes: str) -> Html:
    """Return an element. Attributes that are words of Python end in an underscore, such as ``class_``."""
    values = "".join(f' {key.rstrip("_")}="{_escaped(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{values}>{joined(*content)}</{name}>")


def joined(*content: Content) -> Html:
    """Return all parts, one after the other."""
    parts = (part for each in content for part in ((each,) if isinstance(each, str) else each))
    return Html("".join(part if isinstance(part, Html) else _escaped(part) for part in parts))


def marked(text: str) -> Html:
    """Return a text whose parts between backticks are code."""
    parts = text.split("`")
    return joined(element("code", part) if number % 2 else part for number, part in enumerate(parts))


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = ()) -> Html:
    """Return a table in a box that scrolls sideways. ``numbers``: columns that are aligned to the right."""
    at_right = set(numbers)

    def cells(name: str, row: Sequence[str]) -> Html:
        classes = ("number" if column in at_right else "text" for column in range(len(row)))
        pairs = zip(row, classes, strict=True)
        return element("tr", (element(name, text, class_=class_) for text, class_ in pairs))

    body = element("tbody", (cells("td", row) for row in rows))
    return element("div", element("table", element("thead", cells("th", titles)), body), class_="scroll")


def _escaped(text: str) -> str:
    """Escape a text for HTML. Characters without a picture, such as terminal escapes, become spaces."""
    return escape("".join(letter if letter.isprintable() else " " for letter in text))
