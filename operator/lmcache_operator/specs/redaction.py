"""Removes secrets from objects and texts that other people may read: reports, and a status. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

REMOVED = "<removed>"
_LEFT_OUT = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration", "binaryData"})
"""Fields that repeat the object with its secrets, or that cannot be searched."""
# Not tokens, tokenizers or secretName, and not the name of a file.
_WORD = (
    r"(?:pass(?:word|wd|phrase)s?|requirepass|pwd|secrets?|token|credentials?|authorization"
    r"|(?:api|access|private|encryption|signing|secret)[-_]?keys?)(?![a-z])"
    r"(?![-_]?(?:file|path|dir|name|ref)(?![a-z]))"
)
_SECRET_NAME = re.compile(rf"{_WORD}|[-_.](?:key|auth|pass)s?$", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?i)((?:{_WORD}[\\\"' ]{{0,9}}[=:]|--[\w-]{{0,40}}{_WORD} |\bbearer |\bbasic )"
    r"[\\\"'\[( ]{0,9}(?:bearer |basic )?)(?:(?<=\")[^\"\n]+|(?<=')[^'\n]+|[^\s\\\"',;&)\]}<]+)"
)
# Tokens of Hugging Face, OpenAI, GitHub, GitLab, NVIDIA and AWS, JSON Web Tokens, and private keys.
_KEY = re.compile(
    r"\b(?:hf_|sk-|gh[pos]_|github_pat_|glpat-|nvapi-|A[KS]IA|eyJ)[\w.-]{16,}"
    r"|-BEGIN [A-Z ]*PRIVATE KEY-[\s\S]{0,9999}?-END"
)
_URL_PASSWORD = re.compile(r"(\w://[^/\s:@\"']*:)[^\s\"']{1,256}@|(\w://)[^/\s:@\"']{1,256}@")


class Redactor:
    """Removes secrets. A secret in an object is also removed from all later objects and texts."""

    def __init__(self) -> None:
        self._secrets: set[str] = set()

    def value(self, value: Any, name: str = "") -> Any:
        """Return plain data without secrets. ``name``: name of the field or variable that has the value."""
        if isinstance(value, Mapping):
            # The value of {"name": "PASSWORD", "value": "x"} is the value of a variable.
            variable = str(value.get("name", ""))
            fields = {key: value[key] for key in value if key not in _LEFT_OUT}
            return {key: self.value(fields[key], variable if key == "value" else str(key)) for key in fields}
        if isinstance(value, list):
            return list(self._arguments(value, name))
        if not isinstance(value, str) or not value:
            return value
        if not _SECRET_NAME.search(name):
            return self.text(value)
        self._secrets |= {value} if len(value) >= 8 else set()  # a shorter one can be a common word
        return REMOVED

    def _arguments(self, items: Sequence[Any], option: str) -> Iterator[Any]:
        """Yield the items of a list. In a command line, values of secret options are removed."""
        for item in items:
            if not isinstance(item, str) or not item.startswith("-"):
                yield self.value(item, option)
                continue
            option, separator, value = item.partition("=")
            yield self.text(f"{option}={self.value(value, option)}" if separator else item)
            option = "" if separator else option

    def text(self, text: str) -> str:
        """Return a text without passwords of URLs, values that look like secrets, and known secrets."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, REMOVED)
        text = _KEY.sub(REMOVED, _URL_PASSWORD.sub(rf"\1\2{REMOVED}@", text))
        return _ASSIGNED.sub(rf"\1{REMOVED}", text)
