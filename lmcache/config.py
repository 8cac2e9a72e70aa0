"""Configuration and metadata of the library's engine (field order is part of the API)."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import yaml

from lmcache.logging import init_logger

logger = init_logger(__name__)

Reader: TypeAlias = Callable[[object], object]

_TRUE, _FALSE = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})
_REMOTE_URL = re.compile(r".+://.+:\d+")
_MEMORY = re.compile(r"cpu|cuda(:\d+)?")


@dataclass
class LMCacheEngineConfig:
    """What a user chooses. Constructing it checks nothing; the ``from_…`` methods do."""

    chunk_size: int  # tokens
    local_device: str | None  # see parse_local_device; None: no local storage
    max_local_cache_size: float  # GiB
    remote_url: str | None  # type://host:port; None: no remote storage
    remote_serde: str | None  # "torch", "safetensor", "cachegen" or "fast"
    pipelined_backend: bool  # overlap fetching and deserialising
    save_decode_cache: bool  # store chunks made while decoding too
    enable_blending: bool
    blend_recompute_ratio: float  # of the tokens of a prompt, 0 to 1
    blend_min_tokens: int  # shorter prompts are not blended
    blend_separator: str = "[BLEND_SEP]"
    blend_add_special_in_precomp: bool = False

    @staticmethod
    def from_defaults(
        chunk_size: int = 256,
        local_device: str | None = "cuda",
        max_local_cache_size: float = 5,
        remote_url: str | None = "redis://localhost:6379",
        remote_serde: str | None = "torch",
        pipelined_backend: bool = False,
        save_decode_cache: bool = False,
        enable_blending: bool = False,
        blend_recompute_ratio: float = 0.15,
        blend_min_tokens: int = 256,
        blend_separator: str = "[BLEND_SEP]",
        blend_add_special_in_precomp: bool = False,
    ) -> LMCacheEngineConfig:
        """Take the defaults but for what is given. Raises ValueError for a ``local_device`` that is none."""
        config = LMCacheEngineConfig(**locals())
        if local_device is not None:
            config.local_device = parse_local_device(local_device)
        return config

    @staticmethod
    def from_legacy(
        chunk_size: int = 256,
        backend: str = "cuda",
        max_local_cache_size: float = 5,
        persist_path: str | None = None,
        remote_serde: str | None = "torch",
        pipelined_backend: bool = False,
        save_decode_cache: bool = False,
    ) -> LMCacheEngineConfig:
        """Take one ``backend`` for all: "cpu", "cuda", file://directory or type://host:port.

        ``persist_path`` is ignored. Raises ValueError for any other backend.
        """
        is_remote = not backend.startswith("file://") and _REMOTE_URL.match(backend) is not None
        device, url = (None, backend) if is_remote else (parse_local_device(backend), None)
        where = (chunk_size, device, max_local_cache_size, url)
        return LMCacheEngineConfig.from_defaults(*where, remote_serde, pipelined_backend, save_decode_cache)

    @staticmethod
    def from_file(file_path: str) -> LMCacheEngineConfig:
        """Read a YAML file whose keys are the names of the fields; what it does not name has its default.

        The defaults are those of ``from_defaults`` but for ``local_device``, ``remote_url`` and
        ``remote_serde`` (None) and ``max_local_cache_size`` (20). Unknown keys are said in a warning.
        Raises OSError when the file can't be read, and ValueError, naming file and key, for what it says.
        """
        with open(file_path, "rb") as file:
            try:
                content = yaml.safe_load(file) or {}
            except (yaml.YAMLError, ValueError, RecursionError) as error:
                raise ValueError(f"{file_path} is not a YAML file: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{file_path} must hold keys and values, not a {type(content).__name__}")
        if unknown := [str(key) for key in content if key not in _READERS]:
            logger.warning("%s: unknown keys are ignored: %s", file_path, ", ".join(unknown))
        base = LMCacheEngineConfig.from_defaults(
            local_device=None, max_local_cache_size=20, remote_url=None, remote_serde=None
        )
        given = {name: content[name] for name in _READERS if content.get(name) is not None}
        return _replace(base, given, lambda name: f"{file_path}: {name}")

    @staticmethod
    def from_env() -> LMCacheEngineConfig:
        """Read LMCACHE_CHUNK_SIZE, LMCACHE_LOCAL_DEVICE and so on; an empty variable counts as unset.

        What is not set is as in ``from_defaults(local_device="cpu", remote_url=None, remote_serde=None)``.
        Raises ValueError, naming the variable.
        """
        base = LMCacheEngineConfig.from_defaults(local_device="cpu", remote_url=None, remote_serde=None)
        given: dict[str, object] = {name: os.environ.get(_variable(name)) for name in _READERS}
        given = {name: value for name, value in given.items() if value}
        return _replace(base, given, _variable)


@dataclass
class LMCacheEngineMetadata:
    """What the engine is, as far as its KV cache depends on it."""

    model_name: str
    world_size: int
    worker_id: int
    fmt: str  # "vllm" or "huggingface"
    kv_dtype: torch.dtype
    kv_shape: tuple[int, int, int, int, int]  # (num_layers, 2, chunk_size, num_kv_heads, head_size)
    use_mla: bool = False


@dataclass
class LMCacheMemPoolMetadata:
    """What fixes a pool's slots and their number."""

    kv_shape: tuple[int, int, int, int, int]  # (num_layers, 2, chunk_size, num_kv_heads, head_size)
    kv_dtype: torch.dtype
    max_local_cache_size: float  # GiB


class GlobalConfig:
    """Switches of the whole process."""

    enable_debug = True

    @classmethod
    def set_debug(cls, enable: bool) -> None:
        """Time connectors and serdes, or don't."""
        cls.enable_debug = enable

    @classmethod
    def is_debug(cls) -> bool:
        """Are connectors and serdes timed (a line at level DEBUG per call)?"""
        return cls.enable_debug


def _variable(name: str) -> str:
    return f"LMCACHE_{name.upper()}"


def _replace(
    base: LMCacheEngineConfig, given: Mapping[str, object], where: Callable[[str], str]
) -> LMCacheEngineConfig:
    """Read each given value into its field. Raises ValueError that starts with ``where(name)``."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        try:
            values[name] = _READERS[name](value)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{where(name)}: {error}") from error
    return dataclasses.replace(base, **values)


# Readers of one field each, from YAML or from an environment variable's text. They raise ValueError.


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"Invalid text: {value!r}")
    return value


def _flag(value: object) -> bool:
    text = str(value).strip().lower()
    if text not in _TRUE | _FALSE:
        raise ValueError(f"Invalid truth value: {value!r} (write true or false)")
    return text in _TRUE


def _number(kind: type[int] | type[float], low: float, high: float = float("inf")) -> Reader:
    def read(value: object) -> int | float:
        if isinstance(value, (kind, int, str)) and not isinstance(value, bool) and low <= kind(value) <= high:
            return kind(value)
        raise ValueError(f"Invalid number: {value!r} ({kind.__name__}, {low} to {high})")

    return read


def parse_local_device(value: object) -> str:
    """Read "cpu", "cuda", "cuda:1", or a directory: file://directory or a path with a slash in it.

    Returns the name of the memory, or a path with a slash. Raises ValueError for anything else: a word that
    is mistaken for a device must not become a directory of that name.
    """
    device = _text(value)
    path = os.path.expanduser(device.removeprefix("file://"))
    if is_memory(device):
        return device
    if not path or "://" in path or "\0" in path or (path == device and "/" not in path):
        raise ValueError(
            f"Invalid local storage device: {device!r} (write cpu, cuda, cuda:0, or a directory as "
            "file:///data/kv, /data/kv or ./kv)"
        )
    return path if "/" in path else f"./{path}"


def is_memory(local_device: str) -> bool:
    """Does it name memory of the host or of a GPU, and not a directory?"""
    return _MEMORY.fullmatch(local_device) is not None


def _remote_url(value: object) -> str:
    url = _text(value)
    if _REMOTE_URL.match(url) is None:  # not shown: it may hold a password
        raise ValueError("Invalid remote storage url (write type://host:port)")
    return url


_READERS: dict[str, Reader] = {
    "chunk_size": _number(int, 1),
    "local_device": parse_local_device,
    "max_local_cache_size": _number(float, 0, 1 << 40),
    "remote_url": _remote_url,
    "remote_serde": _text,
    "pipelined_backend": _flag,
    "save_decode_cache": _flag,
    "enable_blending": _flag,
    "blend_recompute_ratio": _number(float, 0, 1),
    "blend_min_tokens": _number(int, 0),
    "blend_separator": _text,
    "blend_add_special_in_precomp": _flag,
}
