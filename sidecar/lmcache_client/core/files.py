"""Identifies a model by its files: the weights by hashes of what the engine has loaded, not by their paths.

A file is accepted only if it can't have changed since the engine could load it. Either its name is a hash of
its bytes (Hugging Face's cache), or its ``ctime`` is older than this process. No tool can set ``ctime``, in
contrast to ``mtime``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from lmcache_client.errors import UnnamedError
from lmcache_store.common.threads import lower_priority

T = TypeVar("T")

_SLICE_BYTES = 1 << 20
"""Bytes hashed at once, in less than 0.2 ms, because some builds of xxhash hold the GIL."""


_VOLATILE_CONFIG = {"_name_or_path", "_commit_hash", "transformers_version"}
"""Fields of a model's configuration that don't influence its KV."""


def model_dir(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Return the directory of a model's files, which may not exist.

    ``model``: a directory or a repository of Hugging Face;
    ``download_dir``: the hub's cache, None: the default.
    """
    if os.path.isdir(model):
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True)
        )
    except Exception:  # not installed, not in the hub's cache, or not a repository: treated as not found
        return Path(model)


def effective_config(config: Mapping[str, Any], max_model_len: int) -> str:
    """Return the model's configuration as the engine uses it, in canonical JSON."""
    fields: dict[str, Any] = {name: value for name, value in config.items() if name not in _VOLATILE_CONFIG}
    if re.search(r'"(longrope|dynamic|su)"', json.dumps(fields, default=str)):  # K depends on max_model_len
        fields["lmcache.max_model_len"] = max_model_len
    return json.dumps(fields, sort_keys=True, default=str)


def fingerprint(folder: Path, began: float) -> str:
    """Hash the safetensors files of a folder, which the engine loaded after ``began`` (Unix time).

    Reads all bytes of files whose hash is not known, so call it on a separate thread. Raises UnnamedError.
    """
    try:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UnnamedError(f"there are no safetensors files in {folder}")
        digest = hashlib.sha256()
        for file in files:
            name, content = file.name.encode(), _blob_hash(file) or _content_hash(file, began)
            digest.update(struct.pack("<QQ", len(name), len(content)) + name + content)
    except OSError as error:
        raise UnnamedError(f"a file can't be read: {error}") from error
    return digest.hexdigest()


def adapter_files(path: Path) -> list[Path]:
    """Return the files of a LoRA adapter that determine its effect. They may not exist."""
    return [path / "adapter_config.json", *sorted(path.glob("*.safetensors"))]


def adapter_state(path: Path) -> list[tuple[int, int, int]]:
    """Return numbers that change with any change of an adapter, whatever the clock of its file system.

    Raises OSError.
    """
    states = [
        state for file in adapter_files(path) for state in (*_links(file), file.stat(), file.parent.stat())
    ]
    return [(state.st_ino, state.st_size, state.st_ctime_ns) for state in states]


def adapter_fingerprint(path: Path, began: float) -> bytes:
    """Hash the files of a LoRA adapter, as ``fingerprint`` does. Raises UnnamedError or OSError."""
    config = (path / "adapter_config.json").read_bytes()
    return hashlib.sha256(fingerprint(path, began).encode() + config).digest()


def check_unchanged(path: Path, began: float) -> None:
    """Raise UnnamedError if a file, its folder or a link on its path changed since ``began`` (Unix time).

    Raises OSError if the file does not exist.
    """
    links = [link.st_ctime for link in _links(path)]
    if max(*links, path.stat().st_ctime, path.parent.stat().st_ctime) >= began:
        raise UnnamedError(f"{path} changed after the engine's start; restart the engine to share its KV")


def is_named_by_content(path: Path, content: bytes) -> bool:
    """Return whether a small file is a link to a blob of Hugging Face's cache with this content.

    Such a file does not change. But its folder does, if the engine downloads the weights when it starts.
    """
    if not path.is_symlink():
        return False
    blob = Path(os.readlink(path))
    name = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # as Git names it
    return blob.parent.name == "blobs" and blob.name == name


def in_background(function: Callable[..., T], *arguments: Any) -> futures.Future[T]:
    """Run a function on a daemon thread of the lowest priority, which does not block the process's exit."""
    result: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            lower_priority(19)
            result.set_result(function(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="lmcache-hash", daemon=True).start()
    return result


def process_start_time() -> float:
    """Return the start time of this process, as Unix time."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _links(path: Path) -> Iterator[os.stat_result]:
    """Yield every symbolic link on the path, also those in targets of links, and finally ``path`` itself."""
    left, here = list(reversed(Path(os.path.abspath(path)).parts)), Path("/")
    while left:
        part = left.pop()
        here = here.parent if part == ".." else here / part
        status = here.lstat()
        if stat.S_ISLNK(status.st_mode):
            yield status
            target = Path(os.readlink(here))
            left.extend(reversed(target.parts))
            here = here.parent
    yield status


def _blob_hash(file: Path) -> bytes | None:
    """Return the hash of a file in a Hugging Face cache: a link to a blob that is named by its hash."""
    if not file.is_symlink():
        return None
    blob = Path(os.readlink(file))
    is_hash = re.fullmatch(r"[0-9a-f]{64}", blob.name) and blob.parent.name == "blobs"
    return bytes.fromhex(blob.name) if is_hash else None


def _content_hash(file: Path, began: float) -> bytes:
    digest, buffer = xxhash.xxh3_128(), bytearray(_SLICE_BYTES)
    with file.open("rb", buffering=0) as stream:
        while num_bytes := stream.readinto(buffer):
            digest.update(memoryview(buffer)[:num_bytes])
    check_unchanged(file, began)  # after the read, so that it covers all bytes that were read
    return digest.digest()
