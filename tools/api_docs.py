"""docs/reference/api.md: the library's public names with their signatures and docstrings."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

MODULES = (
    "lmcache.cache_engine",
    "lmcache.config",
    "lmcache.utils",
    "lmcache.storage_backend",
    "lmcache.storage_backend.abstract_backend",
    "lmcache.storage_backend.local_backend",
    "lmcache.storage_backend.remote_backend",
    "lmcache.storage_backend.hybrid_backend",
    "lmcache.storage_backend.evictor",
    "lmcache.storage_backend.mem_pool",
    "lmcache.storage_backend.serde",
    "lmcache.storage_backend.connector",
    "lmcache.server",
    "lmcache.blend.interfaces",
    "lmcache.blend.executor",
    "lmcache.blend.retriever",
    "lmcache.blend.selection",
    "lmcache.engines.huggingface",
    "lmcache.curves",
    "lmcache.logging",
)
_HEAD = """# The `lmcache` library

Made from the docstrings by `make generate`; how to use it is in [the guide](../guides/library.md).
"""


def render() -> str:
    """The whole page."""
    lines = [_HEAD]
    for name in MODULES:
        module = importlib.import_module(name)
        lines += [f"## `{name}`", "", _doc(module), ""]
        for public, thing in _public(module):
            lines += _entry(public, thing)
    return "\n".join(lines).rstrip() + "\n"


def _public(module: ModuleType) -> Iterator[tuple[str, object]]:
    """What the module offers: its ``__all__``, else what is defined in it."""
    names = getattr(module, "__all__", None) or [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", "") == module.__name__
    ]
    for name in names:
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            yield name, thing


def _entry(name: str, thing: object) -> Iterator[str]:
    if inspect.isclass(thing):
        yield f"### class `{name}{_signature(thing)}`\n"
        yield _doc(thing) + "\n"
        for method, member in vars(thing).items():
            function = inspect.unwrap(getattr(member, "__func__", member))
            if isinstance(member, property):
                function = member.fget
            if method.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
                continue
            signature = "" if isinstance(member, property) else _signature(function)
            yield f"- **`{method}{signature}`**: {_inline(function)}"
        yield ""
    else:
        yield f"### `{name}{_signature(thing)}`\n"
        yield _doc(thing) + "\n"


def _signature(thing: object) -> str:
    if inspect.isclass(thing) and issubclass(thing, (enum.Enum, Exception)):
        return ""
    signature = inspect.signature(thing)  # type: ignore[arg-type]
    wanted = [parameter for name, parameter in signature.parameters.items() if name not in ("self", "cls")]
    text = str(signature.replace(parameters=wanted))
    text = re.sub(r"ForwardRef\(('[^']*')\)", r"\1", text)
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text).removesuffix(" -> None")  # annotations are text


def _doc(thing: object) -> str:
    return (inspect.getdoc(thing) or "").replace("``", "`")


def _inline(thing: object) -> str:
    return " ".join(_doc(thing).split())
