"""Reads what a request says about documents, in ``kv_transfer_params["lmcache"]``.

- ``{"document": true}``: the prompt is a document that later prompts reuse.
- ``{"blend": {"documents": [900, 1000]}}``: the prompt begins with two documents of 900 and 1,000 tokens. The
  rest is the question. ``"start": 40`` says that the first document begins at token 40.
- ``{"blend": {"starts": [40, 940, 1940]}}``: the same by positions. The last number is the question's start.
- ``{"blend": {"separator": true}}``: the documents are the parts between the configured separators.
- ``{"blend": true}``, or an object that names no documents: the engine finds documents that it knows. If
  ``lmcache.blend`` is ``auto``, it also does so for requests without ``blend``, unless they are documents.
- ``{"blend": false}``: the prompt is never blended.

``selection`` and ``ratio`` in the object replace the engine's settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Any

from lmcache_client.blend.selection import NAMES
from lmcache_client.vllm.blend.separator import Separator
from lmcache_client.vllm.hand_over import FIELD

MAX_DOCUMENTS = 256
"""Largest number of documents of a prompt. Each one costs a message to the sidecar."""

_MAX_SEPARATORS = 4 * MAX_DOCUMENTS
"""Largest number of separators of a prompt. Parts without tokens are no documents, so there may be more."""
_MARKS = "documents, starts or separator"
_MARK_KEYS = {"documents", "start", "starts", "separator"}
_KEYS = _MARK_KEYS | {"selection", "ratio"}


class ParamsError(ValueError):
    """Parameters that cannot be used, with the name of the first invalid field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field
        """A field of this module's docstring. Not one that a client made up, so that there are few."""


@dataclass(frozen=True)
class BlendParams:
    """How a prompt is to be blended."""

    documents: tuple[range, ...]
    """Positions of each document in the prompt, in ascending order. None is empty."""
    selection: str
    ratio: float
    is_detected: bool = False
    """True if the request names no documents: the engine must find them."""

    def salt(self, cache_salt: str | None, secret: str) -> str:
        """Return the salt under which the engine caches the blended blocks of a request.

        The engine then reuses them only for requests with the same salt, selection and ratio. Clients must
        not know the ``secret``: an exact request with this salt would get blended KV.
        """
        return f"{cache_salt or ''}\0blend {secret}\0{self.selection}\0{self.ratio}"


def is_document(params: Any) -> bool:
    """Return True if the prompt of a request with these ``kv_transfer_params`` is a document.

    Raises ParamsError.
    """
    value = _section(params).get("document")
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ParamsError("document", f"must be true or false, not {_shown(value)}")


def read_blend(
    params: Any,
    tokens: Sequence[int],
    selection: str,
    ratio: float,
    separator: Separator,
    *,
    is_auto: bool = False,
) -> BlendParams | None:
    """Return how to blend the prompt of a request with these ``kv_transfer_params``; None: not at all.

    There are no documents yet if the engine must find them.

    Args:
        params: what the client sent, of any type.
        tokens: tokens of the prompt.
        selection, ratio, separator: the engine's settings.
        is_auto: True if the engine finds documents of requests that do not mention blending.

    Raises ParamsError.
    """
    value = _section(params).get("blend")
    if value is None:
        value = is_auto and not is_document(params)
    if value is False:
        return None
    if value is True:
        value = {}
    if not isinstance(value, dict):
        message = f"must be true, false or an object with {_MARKS}, not {_shown(value)}"
        raise ParamsError("blend", message)
    if unknown := value.keys() - _KEYS:
        raise ParamsError("blend", f"has unknown keys: {', '.join(sorted(map(_shown, unknown)))}")
    documents: tuple[range, ...] = ()
    if not (is_detected := value.keys().isdisjoint(_MARK_KEYS)):
        documents = _separated(tokens, separator) if _has_separator(value) else _documents(value, len(tokens))
    selection, ratio = value.get("selection", selection), value.get("ratio", ratio)
    if not isinstance(selection, str) or selection not in NAMES:
        raise ParamsError("selection", f"must be one of {', '.join(NAMES)}, not {_shown(selection)}")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise ParamsError("ratio", f"must be a number from 0 to 1, not {_shown(ratio)}")
    return BlendParams(documents, selection, float(ratio), is_detected) if documents or is_detected else None


def _has_separator(value: Mapping[str, Any]) -> bool:
    """Return True if separators mark the documents. Then nothing else may mark them."""
    has_separator = value.get("separator", False)
    if not isinstance(has_separator, bool):
        raise ParamsError("separator", f"must be true or false, not {_shown(has_separator)}")
    if has_separator and (marks := value.keys() & {"documents", "start", "starts"}):
        raise ParamsError("separator", f"must be left out if there are {' and '.join(sorted(marks))}")
    return has_separator


def _separated(tokens: Sequence[int], separator: Separator) -> tuple[range, ...]:
    """Return the parts between separators. The part behind the last one is the question."""
    if not (size := len(separator.tokens)):
        raise ParamsError("separator", separator.obstacle)
    places = list(islice(separator.places(tokens), _MAX_SEPARATORS + 1))
    if len(places) > _MAX_SEPARATORS:
        raise ParamsError("separator", f"must occur at most {_MAX_SEPARATORS} times in a prompt")
    documents = tuple(range(start + size, end) for start, end in pairwise(places) if start + size < end)
    if len(documents) > MAX_DOCUMENTS:
        raise ParamsError("separator", f"must mark at most {MAX_DOCUMENTS} documents, not {len(documents)}")
    if documents and places[-1] + size == len(tokens):
        raise ParamsError("separator", "ends the prompt: at least one token of a question must follow")
    return documents


def _documents(value: Mapping[str, Any], num_tokens: int) -> tuple[range, ...]:
    if ("documents" in value) == ("starts" in value):
        raise ParamsError("blend", f"must have one of {_MARKS}")
    if "starts" in value:
        field, edges = "starts", _numbers("starts", value["starts"], num_tokens)
        if "start" in value:
            raise ParamsError("start", "must be left out if there are starts")
        if edges != sorted(edges):
            raise ParamsError("starts", "must be in ascending order")
    else:
        field, (start,) = "documents", _numbers("start", [value.get("start", 0)], num_tokens)
        edges = list(accumulate(_numbers(field, value["documents"], num_tokens), initial=start))
    if len(edges) > MAX_DOCUMENTS + 1:
        raise ParamsError(field, f"must have at most {MAX_DOCUMENTS} documents, not {len(edges) - 1}")
    documents = tuple(range(start, end) for start, end in pairwise(edges) if start < end)
    if documents and documents[-1].stop >= num_tokens:
        end = documents[-1].stop
        message = f"end at token {end} of {num_tokens}: at least one token of a question must follow"
        raise ParamsError(field, message)
    return documents


def _numbers(field: str, value: Any, num_tokens: int) -> list[int]:
    if not isinstance(value, list):
        raise ParamsError(field, f"must be a list of numbers of tokens, not {_shown(value)}")
    if len(value) > MAX_DOCUMENTS + 1:  # of starts, the last one is the question's
        raise ParamsError(
            field, f"has {len(value)} entries, but a prompt has at most {MAX_DOCUMENTS} documents"
        )
    for number in value:
        if type(number) is not int or not 0 <= number <= num_tokens:
            raise ParamsError(field, f"must have numbers from 0 to {num_tokens}, not {_shown(number)}")
    return value


def _section(params: Any) -> Mapping[str, Any]:
    section = params.get(FIELD) if isinstance(params, dict) else None
    return section if isinstance(section, dict) else {}


def _shown(value: object) -> str:
    """Return a short text of a value that a client sent. Cannot fail, as ``repr`` can for nested lists."""
    if isinstance(value, str):
        return repr(value[:100])
    is_short = value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 64)
    return repr(value) if is_short else f"a value of type {type(value).__name__}"
