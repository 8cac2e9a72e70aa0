"""Configuration and metadata of the library's engine (field order is part of the API)."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection
from dataclasses import dataclass

import torch

from lmcache import options
from lmcache.logging import init_logger

logger = init_logger(__name__)

_YAML_NULLS = ("~", "null", "Null", "NULL")
_SWITCH_WORDS = {"1": "true", "yes": "true", "on": "true", "0": "false", "no": "false", "off": "false"}
_MANY = 1 << 40
_REMOTE_URL = re.compile(r".+://.+:\d+")
_MEMORY = re.compile(r"cpu|cuda(:\d+)?")


@dataclass
class LMCacheEngineConfig:
    """What a user chooses. Constructing it checks nothing; the ``from_…`` methods do."""

    chunk_size: int
    """Tokens."""
    local_device: str | None
    """See parse_local_device; None: no local storage."""
    max_local_cache_size: float
    """GiB."""
    remote_url: str | None
    """type://host:port; None: no remote storage."""
    remote_serde: str | None
    """One of "torch", "safetensor", "cachegen" or "fast"."""
    pipelined_backend: bool
    """Overlap fetching and deserialising."""
    save_decode_cache: bool
    """Store chunks made while decoding too."""
    enable_blending: bool
    """Reuse the KV of segments that were computed apart (``lmcache.engines.huggingface.BlendedModel``)."""
    blend_recompute_ratio: float
    """Of the reused tokens of a prompt how many are computed again, 0 to 1."""
    blend_min_tokens: int
    """Shorter prompts are not blended."""
    blend_separator: str = "[BLEND_SEP]"
    """What divides a text into segments; it is no part of the prompt."""
    blend_add_special_in_precomp: bool = False
    """Compute segments behind the special tokens that the tokenizer puts before every text."""

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
            content = options.read_yaml(file_path, file.read())
        for sentence in options.unknown_keys(file_path, content, _READERS):
            logger.warning("%s", sentence)
        base = LMCacheEngineConfig.from_defaults(
            local_device=None, max_local_cache_size=20, remote_url=None, remote_serde=None
        )
        return _replaced(base, options.Source(lambda name: f"{file_path}: {name}", content), _YAML_NULLS)

    @staticmethod
    def from_env() -> LMCacheEngineConfig:
        """Read LMCACHE_CHUNK_SIZE, LMCACHE_LOCAL_DEVICE and so on; an empty variable counts as unset.

        What is not set is as in ``from_defaults(local_device="cpu", remote_url=None, remote_serde=None)``.
        Raises ValueError, naming the variable.
        """
        base = LMCacheEngineConfig.from_defaults(local_device="cpu", remote_url=None, remote_serde=None)
        return _replaced(base, options.environment(_READERS, os.environ))


@dataclass
class LMCacheEngineMetadata:
    """What the engine is, as far as its KV cache depends on it."""

    model_name: str
    world_size: int
    worker_id: int
    fmt: str
    """One of "vllm" or "huggingface"."""
    kv_dtype: torch.dtype
    kv_shape: tuple[int, int, int, int, int]
    """(num_layers, 2, chunk_size, num_kv_heads, head_size)."""
    use_mla: bool = False


@dataclass
class LMCacheMemPoolMetadata:
    """What fixes a pool's slots and their number."""

    kv_shape: tuple[int, int, int, int, int]
    """(num_layers, 2, chunk_size, num_kv_heads, head_size)."""
    kv_dtype: torch.dtype
    max_local_cache_size: float
    """GiB."""


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


def _replaced(
    base: LMCacheEngineConfig, source: options.Source, nulls: Collection[str] = ()
) -> LMCacheEngineConfig:
    """Read what a source says into the fields. Empty, or one of ``nulls``, is as if it said nothing.

    Raises ValueError, which names all that can't be used.
    """
    said = {name: value for name, value in source.values.items() if value not in ("", None, *nulls)}
    values, mistakes = options.read_values(_READERS, [source._replace(values=said)])
    if mistakes:
        raise ValueError("; ".join(mistakes))
    return dataclasses.replace(base, **values)


def _flag(text: str) -> bool:
    word = text.strip().lower()
    return options.switch(_SWITCH_WORDS.get(word, word))


def parse_local_device(device: str) -> str:
    """Read "cpu", "cuda", "cuda:1", or a directory: file://directory or a path with a slash in it.

    Returns the name of the memory, or a path with a slash. Raises ValueError for anything else: a word that
    is mistaken for a device must not become a directory of that name.
    """
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


def _check_remote_url(url: str) -> None:
    if _REMOTE_URL.match(url) is None:  # not shown: it may hold a password
        raise ValueError("Invalid remote storage url (write type://host:port)")


_READERS: dict[str, options.Reader] = {
    "chunk_size": options.number(int, 1, _MANY, "a number of tokens: write 1 or more"),
    "local_device": parse_local_device,
    "max_local_cache_size": options.number(float, 0, _MANY, "a number of GiB: write 0 or more"),
    "remote_url": options.checked(_check_remote_url),
    "remote_serde": str,
    "pipelined_backend": _flag,
    "save_decode_cache": _flag,
    "enable_blending": _flag,
    "blend_recompute_ratio": options.number(float, 0, 1, "a ratio from 0 to 1"),
    "blend_min_tokens": options.number(int, 0, _MANY, "a number of tokens: write 0 or more"),
    "blend_separator": str,
    "blend_add_special_in_precomp": _flag,
}
