"""Configuration and metadata of the library's engine. The order of the fields is part of the API."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection
from dataclasses import dataclass

import torch

from lmcache.logging import init_logger
from lmcache_store.common import options

logger = init_logger(__name__)

_YAML_NULLS = ("~", "null", "Null", "NULL")
_BOOLEAN_WORDS = {"1": "true", "yes": "true", "on": "true", "0": "false", "no": "false", "off": "false"}
_NO_LIMIT = 1 << 40
_REMOTE_URL = re.compile(r".+://.+:\d+")
_MEMORY = re.compile(r"cpu|cuda(:\d+)?")


@dataclass
class LMCacheEngineConfig:
    """User settings of an engine. The ``from_…`` methods check the values; the constructor does not."""

    chunk_size: int
    """Tokens of a chunk."""
    local_device: str | None
    """Location of the local storage (see ``parse_local_device``), or None for no local storage."""
    max_local_cache_size: float
    """Capacity of the local storage in GiB."""
    remote_url: str | None
    """URL of the remote storage, type://host:port, or None for no remote storage."""
    remote_serde: str | None
    """Serialization format of remote chunks: "torch", "safetensor", "cachegen" or "fast"."""
    pipelined_backend: bool
    """Whether fetching and deserializing of remote chunks overlap."""
    save_decode_cache: bool
    """Whether chunks that are computed during decoding are stored, too."""
    enable_blending: bool
    """Whether to reuse KV of separately stored segments (``lmcache.huggingface.BlendedModel``)."""
    blend_recompute_ratio: float
    """Share of a prompt's reused tokens that is recomputed, 0 to 1."""
    blend_min_tokens: int
    """Tokens of the shortest prompt that is blended."""
    blend_separator: str = "[BLEND_SEP]"
    """Text that separates the segments of a prompt; it is not part of the prompt itself."""
    blend_add_special_in_precomp: bool = False
    """Whether segments are computed after the special tokens that the tokenizer puts before every text."""

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
        """Use the defaults for all settings that are not given.

        Raises ValueError for a bad ``local_device``.
        """
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
        """Configure one storage, local or remote, named by ``backend``.

        ``backend`` is "cpu", "cuda", file://directory or type://host:port; any other value raises ValueError.
        ``persist_path`` is ignored.
        """
        is_remote = not backend.startswith("file://") and _REMOTE_URL.match(backend) is not None
        device, url = (None, backend) if is_remote else (parse_local_device(backend), None)
        storage = (chunk_size, device, max_local_cache_size, url)
        return LMCacheEngineConfig.from_defaults(*storage, remote_serde, pipelined_backend, save_decode_cache)

    @staticmethod
    def from_file(file_path: str) -> LMCacheEngineConfig:
        """Read a YAML file whose keys are the names of the fields; missing fields have defaults.

        The defaults are those of ``from_defaults``, with four exceptions. ``local_device``, ``remote_url``
        and ``remote_serde`` default to None, and ``max_local_cache_size`` defaults to 20. Unknown keys are
        ignored and logged as warnings.

        Raises OSError if the file can't be read, and ValueError, which names file and key, if a value is
        invalid.
        """
        with open(file_path, "rb") as file:
            content = options.read_yaml(file_path, file.read())
        for warning in options.unknown_keys(file_path, content, _READERS):
            logger.warning("%s", warning)
        base = LMCacheEngineConfig.from_defaults(
            local_device=None, max_local_cache_size=20, remote_url=None, remote_serde=None
        )
        return _replaced(base, options.Source(lambda name: f"{file_path}: {name}", content), _YAML_NULLS)

    @staticmethod
    def from_env() -> LMCacheEngineConfig:
        """Read one environment variable per field: LMCACHE_CHUNK_SIZE, LMCACHE_LOCAL_DEVICE and so on.

        The defaults are those of ``from_defaults(local_device="cpu", remote_url=None, remote_serde=None)``.
        They apply to unset and empty variables. Raises ValueError, which names the variable.
        """
        base = LMCacheEngineConfig.from_defaults(local_device="cpu", remote_url=None, remote_serde=None)
        return _replaced(base, options.environment(_READERS, os.environ))


@dataclass
class LMCacheEngineMetadata:
    """Properties of an engine that determine its KV cache."""

    model_name: str
    world_size: int
    worker_id: int
    fmt: str
    """Layout of KV: "vllm" or "huggingface"."""
    kv_dtype: torch.dtype
    kv_shape: tuple[int, int, int, int, int]
    """Shape of a full chunk: (num_layers, 2, chunk_size, num_kv_heads, head_size)."""
    use_mla: bool = False


@dataclass
class LMCacheMemPoolMetadata:
    """Properties of a memory pool: they determine the size and the number of its slots."""

    kv_shape: tuple[int, int, int, int, int]
    """Shape of a full chunk: (num_layers, 2, chunk_size, num_kv_heads, head_size)."""
    kv_dtype: torch.dtype
    max_local_cache_size: float
    """Capacity in GiB."""


class GlobalConfig:
    """Settings of the whole process."""

    enable_debug = True

    @classmethod
    def set_debug(cls, enable: bool) -> None:
        """Switch the timing of connectors and serdes on or off."""
        cls.enable_debug = enable

    @classmethod
    def is_debug(cls) -> bool:
        """Return whether the duration of each call of a connector or serde is logged at level DEBUG."""
        return cls.enable_debug


def _replaced(
    base: LMCacheEngineConfig, source: options.Source, nulls: Collection[str] = ()
) -> LMCacheEngineConfig:
    """Return ``base`` with the values of ``source``. Empty values and ``nulls`` count as not set.

    Raises ValueError, which names all invalid values.
    """
    given = {name: value for name, value in source.values.items() if value not in ("", None, *nulls)}
    values, mistakes = options.read_values(_READERS, [source._replace(values=given)])
    if mistakes:
        raise ValueError("; ".join(mistakes))
    return dataclasses.replace(base, **values)


def _flag(text: str) -> bool:
    word = text.strip().lower()
    return options.switch(_BOOLEAN_WORDS.get(word, word))


def parse_local_device(device: str) -> str:
    """Parse "cpu", "cuda", "cuda:1", or a directory: file://directory or a path that contains a slash.

    Returns the device name, or a path that contains a slash. Raises ValueError for anything else, so that a
    misspelled device does not become a directory of that name.
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
    """Return whether ``local_device`` names memory of the host or of a GPU, not a directory."""
    return _MEMORY.fullmatch(local_device) is not None


def _check_remote_url(url: str) -> None:
    if _REMOTE_URL.match(url) is None:  # the message omits the URL, which may contain a password
        raise ValueError("Invalid remote storage url (write type://host:port)")


_READERS: dict[str, options.ValueReader] = {
    "chunk_size": options.number(int, 1, _NO_LIMIT, "a number of tokens: write 1 or more"),
    "local_device": parse_local_device,
    "max_local_cache_size": options.number(float, 0, _NO_LIMIT, "a number of GiB: write 0 or more"),
    "remote_url": options.checked(_check_remote_url),
    "remote_serde": str,
    "pipelined_backend": _flag,
    "save_decode_cache": _flag,
    "enable_blending": _flag,
    "blend_recompute_ratio": options.number(float, 0, 1, "a ratio from 0 to 1"),
    "blend_min_tokens": options.number(int, 0, _NO_LIMIT, "a number of tokens: write 0 or more"),
    "blend_separator": str,
    "blend_add_special_in_precomp": _flag,
}
