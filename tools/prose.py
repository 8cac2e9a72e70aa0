"""Check the prose of Markdown files: sentence length and clipped words.

``python -m tools.prose [FILE...]`` prints the problems. ``--long`` also prints the longest sentences.
Code blocks and drawings are skipped. A list item ends a sentence. Headings and table cells are checked for
clipped words only. Boxes (``> [!NOTE]``) are checked as other text.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence

from tools.sources import ROOT

MAX_WORDS, MAX_ADR_WORDS = 28, 32
"""Limits of the 90th percentile of a file's sentence lengths, in guides and in ADRs."""
CLIPPED = {
    r"\btold\b": "reported, sent",
    r"\btells?\b": "reports, sends, shows",
    r"\bbr(?:ing|ings|ought)\b": "load, fetch, promote, return",
    r"\bwhoever\b": "name the actor",
    r"\bwhatever\b": "name the thing",
    r"\b(?:some|no)body\b": "name the actor",
    r"\blets? go\b": "release",
    r"\bgone\b": "deleted, missing, evicted",
    r"\bat rest\b": "idle",
    r"\bin mid-": "during",
    r"(?<!\bthere )\b(?:is|are|says?|means?) (?-i:none)\b": "is invalid, is missing",
    r"\bthat which\b": "name the thing",
    r"\ball that\b": "all X that",
    r"\bnews\b": "change",
    r"\bmakes? room\b": "evicts",
    r"\bbeside\b": "next to, compared with, in addition to",
    r"\banew\b": "again",
    r"\bstands? in the (?:way|status)\b": "blocks; is in the status",
}
"""Regular expressions of clipped words, and words of the field in their place."""
ALLOWED = frozenset[tuple[str, str]]()
"""Pairs of a file name and a clipped word that this file may use."""
_FENCE = re.compile(r"^\s*(```|~~~)")
_BULLET = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
_BOX = re.compile(r"^\s*> ?(?:\[!\w+\])?")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|cf|vs|etc)\.")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_]*[A-Z0-9`\[])")


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a Markdown text, each as one line."""
    lines: list[str] = []
    is_code = False
    for line in [*text.splitlines(), ""]:
        line = _BOX.sub("", line)
        if _FENCE.match(line):
            is_code = not is_code
            line = ""
        elif is_code or (line.lstrip().startswith(("|", "#", "<", "    ")) and not lines):
            line = ""
        is_bullet = _BULLET.match(line) is not None
        if (not line.strip() or is_bullet) and lines:
            yield " ".join(lines)
            lines = []
        if line.strip():
            lines.append(_BULLET.sub("", line).strip())


def headings_and_cells(text: str) -> Iterator[str]:
    """Yield the headings and table cells of a Markdown text."""
    is_code = False
    for line in text.splitlines():
        if _FENCE.match(line):
            is_code = not is_code
        elif not is_code and line.startswith("#"):
            yield line.lstrip("# ")
        elif not is_code and line.lstrip().startswith("|"):
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", line) if cell.strip(" -:"))


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a Markdown text. Code counts as one word, and a link as its text."""
    for paragraph in paragraphs(text):
        yield from split(paragraph)


def split(paragraph: str) -> Iterator[str]:
    """Yield the sentences of one paragraph or table cell."""
    plain = re.sub(r"``?[^`]+``?", "CODE", paragraph)
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    plain = _ABBREVIATION.sub(lambda match: match[0].replace(".", ""), plain)
    yield from (part for part in _SENTENCE_END.split(plain) if part.strip())


def num_words(sentence: str) -> int:
    return len(re.findall(r"[\w'%.,/-]*\w[\w'%]*", sentence))


def clipped_words(name: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield a line for each clipped word in sentences. ``name`` is the file's."""
    for sentence in texts:
        for clipped, better in CLIPPED.items():
            match = re.search(clipped, sentence, re.IGNORECASE)
            if match and (name, match[0].lower()) not in ALLOWED:
                yield f"{name}: {match[0]!r} ({better}): {sentence[:100]}"


def problems(name: str, text: str) -> Iterator[str]:
    """Yield a line for each problem of a Markdown file."""
    lengths = sorted(map(num_words, sentences(text)))
    limit = MAX_ADR_WORDS if "/adr/" in name else MAX_WORDS
    if lengths and (nine_in_ten := lengths[int(0.9 * (len(lengths) - 1))]) > limit:
        yield f"{name}: one sentence in ten has {nine_in_ten} words or more, the limit is {limit}"
    fragments = (sentence for part in headings_and_cells(text) for sentence in split(part))
    yield from clipped_words(name, itertools.chain(sentences(text), fragments))


def tracked() -> list[str]:
    """Names of all Markdown files in the repository, including generated ones."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split() if (ROOT / name).exists()]


def all_problems() -> list[str]:
    """The problems of all Markdown files, one line each."""
    return [problem for name in tracked() for problem in problems(name, (ROOT / name).read_text())]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--long", action="store_true", help="print the ten longest sentences of each file")
    options = parser.parse_args(arguments)
    num_problems = 0
    for name in options.files or tracked():
        text = (ROOT / name).read_text()
        for problem in problems(name, text):
            print(problem)
            num_problems += 1
        if options.long:
            for sentence in sorted(sentences(text), key=num_words)[:-11:-1]:
                print(f"{name}: {num_words(sentence)} words: {sentence}")
    return min(num_problems, 1)


if __name__ == "__main__":
    sys.exit(main())
