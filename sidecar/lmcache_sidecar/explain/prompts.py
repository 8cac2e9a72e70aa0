"""Reads a prompt from a file, and turns its text into token ids."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from lmcache_sidecar.explain.asking import ExplainError, ask

_MAX_BYTES = 4 << 20
"""Largest file: its answer takes less than 5 s."""
_FORMS = '[1, 2, 3], {"token_ids": [1, 2, 3]}, {"prompt": "text"} or {"messages": [...]}'
_ALTERNATIVES = (
    'give token ids in place of text ({"token_ids": [...]}), or let the engine tokenise the text: '
    "--engine-url http://127.0.0.1:8000"
)


class Prompt(NamedTuple):
    """A prompt as the user gave it."""

    content: Any
    """Token ids, a text, or the messages of a chat."""
    cache_salt: str = ""
    lora_name: str = ""


def read(path: str) -> Prompt:
    """Read a prompt from a file, or from standard input for "-". Raises ExplainError.

    JSON in one of the documented forms is parsed. Anything else is the text of the prompt.
    """
    try:
        with open(path, "rb") if path != "-" else sys.stdin.buffer as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ExplainError(f"can't read the prompt in {path}: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise ExplainError(
            f"the prompt in {path} has more than {_MAX_BYTES >> 20} MiB: give its first part, which decides "
            "what a request loads"
        )
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ExplainError(f"the prompt in {path} is not UTF-8 text: {error}") from error
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = text
    return _prompt(fields, text, path)


def _prompt(fields: Any, text: str, path: str) -> Prompt:
    if isinstance(fields, list):
        fields = {"token_ids": fields}
    if not isinstance(fields, dict):
        return Prompt(text)
    contents = [fields[name] for name in ("token_ids", "prompt", "messages") if name in fields]
    unknown = fields.keys() - {"token_ids", "prompt", "messages", "cache_salt", "lora_name"}
    if len(contents) != 1 or unknown:
        what = f"has the unknown field {min(unknown)!r}" if unknown else "has no prompt, or several"
        raise ExplainError(f"the JSON in {path} {what}: it must have the form {_FORMS}")
    names = [fields.get(name) or "" for name in ("cache_salt", "lora_name")]
    is_text = isinstance(contents[0], str) == ("prompt" in fields)
    if not is_text or not all(isinstance(name, str) for name in names):
        raise ExplainError(f"the JSON in {path} has a field of a wrong type: it must have the form {_FORMS}")
    return Prompt(contents[0], *names)


def token_ids(prompt: Prompt, engine_url: str | None, tokenizer: str | None, model: str) -> list[int]:
    """Return the token ids of a prompt. Raises ExplainError.

    ``tokenizer``: directory or ``tokenizer.json`` of the tokenizer; None: the directory ``model``.
    """
    content = prompt.content
    if isinstance(content, list) and not (content and isinstance(content[0], dict)):
        if not all(type(token) is int for token in content):
            raise ExplainError("token ids must be whole numbers")
        return content
    if engine_url is not None:
        name = "prompt" if isinstance(content, str) else "messages"
        answer = ask(engine_url, "/tokenize", {name: content}, server="engine", option="--engine-url")
        try:
            return [int(token) for token in answer["tokens"]]
        except (LookupError, TypeError, ValueError) as error:
            raise ExplainError(f"{engine_url}/tokenize did not answer with tokens: {error!r}") from error
    if not isinstance(content, str):
        raise ExplainError(f"only the engine knows the chat template of messages: {_ALTERNATIVES}")
    return _tokenise(content, tokenizer, model)


def _tokenise(text: str, tokenizer: str | None, model: str) -> list[int]:
    path = Path(tokenizer or model)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        where = (
            f"--tokenizer: there is no {path}"
            if tokenizer
            else f"no tokenizer of {model!r} is on this machine"
        )
        raise ExplainError(f"{where}: give its directory with --tokenizer, {_ALTERNATIVES}")
    try:
        tokenizers = importlib.import_module("tokenizers")  # not a dependency of the sidecar
    except ImportError as error:
        raise ExplainError(f"the Python package tokenizers is not installed here: {_ALTERNATIVES}") from error
    try:
        return list(tokenizers.Tokenizer.from_file(str(path)).encode(text).ids)
    except Exception as error:  # the package raises Exception itself
        raise ExplainError(f"{path} is not a tokenizer: {error}") from error
