"""Configuration: one field per option, taken from flag > environment > file > default.

A field's name is its YAML key; ``--memory-size`` and ``LMCACHE_MEMORY_SIZE`` are made of it. All sources go
through the same parser, so a mistake reads the same wherever it was made.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from lmcache.options import (
    ENV_PREFIX,
    Reader,
    Source,
    checked,
    environment,
    number,
    one_of,
    read_values,
    read_yaml,
    switch,
    unknown_keys,
    variable_of,
)
from lmcache.rpc.service import DEFAULT_SOCKET, check_socket_path
from lmcache.tiers.remote.address import Address, Kind
from lmcache.units import parse_size


class ConfigError(Exception):
    """The configuration can't be used; one line that names the source, the value and the remedy."""


_SOCKET = checked(check_socket_path)
_PORT = number(int, 0, 65535, "a port: write a number from 1 to 65535, or 0 for any free one")
_DEADLINE = number(float, 0.01, 60, "a number of seconds from 0.01 to 60")
_NODE = number(int, 0, 1023, "a NUMA node: write its number, 0 is the first")
_PERCENT = number(int, 1, 100, "a percentage: write a number from 1 to 100; 100 is no limit")
_SECONDS = number(float, 0, 3600, "a number of seconds from 0 to 3600")


def _read_address(url: str) -> Address | None:
    return Address.parse(url) if url else None


def _option(metavar: str, default: str, parse: Reader, about: str) -> Any:
    """Make a field; ``default`` is written as a user would write it."""
    return field(
        default=parse(default),
        metadata={"parse": parse, "metavar": metavar, "default": default, "about": about},
    )


# fmt: off
@dataclass(frozen=True)
class Config:
    """All options of ``lmcache-sidecar serve``."""

    socket: str = _option("PATH", DEFAULT_SOCKET, _SOCKET,
        "UNIX socket for engines; its directory must exist, both containers mount it at the same path")
    arena: str = _option("PATH", "", str,
        "file that holds the memory tier, on tmpfs; outlives a restart (default: 'arena' beside the socket)")
    memory_size: int = _option("SIZE", "1Gi", parse_size,
        "size of the memory tier: plain bytes, or with Ki, Mi, Gi, Ti")
    memory_max_size: int = _option("SIZE", "", lambda text: parse_size(text) if text else 0,
        "to which the memory tier can grow without a restart; memory that it does not have yet costs nothing;"
        " empty: its size")
    memory_size_file: str = _option("FILE", "", str,
        "file with the size that the memory tier is to have now, followed while it changes: a size as above;"
        " empty, or until there is such a file: --memory-size")
    tenant_quota_percent: int = _option("PERCENT", "100", _PERCENT,
        "how much of the memory tier the rows of one tenant (one cache salt) may take: one that has as much"
        " makes room with its own; requests without a salt are not limited")
    huge_pages: bool = _option("BOOL", "false", switch,
        "true: take huge pages for the memory tier where the kernel has them: faster copies, a slower start")
    numa_node: int | None = _option("NODE", "", lambda text: _NODE(text) if text else None,
        "NUMA node to take the memory tier's pages from, while it has any; empty: as the kernel likes")
    transfer: str = _option("MODE", "Auto", one_of("Auto", "CudaIPC", "SharedMemory"),
        "who copies what engines on GPUs store: Auto or CudaIPC, the sidecar, where it can read the GPU, else"
        " the engine; SharedMemory, always the engine")
    disk_path: str = _option("PATH", "", str,
        "directory of the disk tier, used by this sidecar alone; empty: no disk tier")
    disk_size: int = _option("SIZE", "10Gi", parse_size,
        "size of the disk tier, at most nine tenths of its volume")
    admit: str = _option("POLICY", "All", one_of("All", "OnReuse"),
        "which chunks go to disk and remote tier: All, or OnReuse, those that were hit once in memory")
    remote_url: Address | None = _option("URL", "", _read_address,  # noqa: RUF009
        "Redis or Valkey that all pods share: redis://host:port/db or unix:///path; several hosts with commas"
        " are shards; also rediss:// (TLS), redis-sentinel:// and redis-cluster://; empty: no remote tier")
    remote_shards_file: str = _option("FILE", "", str,
        "file with the list of the remote tier's shards, followed while it changes: current and previous,"
        " each a list of host:port, and until, the time up to which the previous ones are asked, too; empty,"
        " or while there is no such file: the hosts of the URL")
    remote_timeout_seconds: float = _option("SECONDS", "1", _DEADLINE,
        "deadline of a connection to the remote tier, and of each step of a read or write (up to 3 MiB)")
    remote_username_file: str = _option("FILE", "", str,
        "file with the user name for the remote tier; empty: the default user")
    remote_password_file: str = _option("FILE", "", str,
        "file with the password for the remote tier; empty: no password")
    drain_grace_seconds: float = _option("SECONDS", "20", _SECONDS,
        "how long a stopping sidecar goes on writing what is queued for disk and remote tier")
    stay_up: bool = _option("BOOL", "false", switch,
        "true, as in the image: a sidecar that can't run does not exit, since that would take its pod out of"
        " service; it says why in /readyz, and tries again")
    http_host: str = _option("ADDRESS", "", str,
        "address of the read-only HTTP server; empty: every address, of IPv4 and IPv6")
    http_port: int = _option("PORT", "9464", _PORT,
        "port of /metrics, /stats, /healthz and /readyz; 0: any free one, see the log")
    log_format: str = _option("FORMAT", "text", one_of("text", "json"), "text or json")
    log_level: str = _option("LEVEL", "info", one_of("debug", "info", "warning", "error"),
        "debug, info, warning or error")
    # fmt: on

    @property
    def arena_path(self) -> str:
        """Where the arena lies."""
        return self.arena or str(Path(self.socket).parent / "arena")

    @property
    def memory_capacity(self) -> int:
        """Bytes to which the memory tier can grow."""
        return self.memory_max_size or self.memory_size

    @property
    def has_credential_files(self) -> bool:
        """Are user name or password of the remote tier in files?"""
        return bool(self.remote_username_file or self.remote_password_file)

    def present(self, address: Address) -> Address:
        """Return the remote tier's address with the user name and password that its files, if there are any,
        say now. Raises ConfigError."""
        username = _read_secret("remote_username_file", self.remote_username_file)
        password = _read_secret("remote_password_file", self.remote_password_file)
        return replace(
            address, username=username or address.username, password=password or address.password
        )


def _read_secret(name: str, path: str) -> str:
    return read_text(path, f"{flag_of(name)}: ").strip() if path else ""


def read_text(path: str, source: str = "") -> str:
    """Read a file. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise ConfigError(f"{source}{path} can't be read: {reason}") from error


def flag_of(name: str) -> str:
    """The command line's name of a field."""
    return "--" + name.replace("_", "-")


def options() -> dict[str, Field[Any]]:
    """Fields by name."""
    return {option.name: option for option in fields(Config)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field. Values stay text: ``read`` parses them."""
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file with the options below as keys [{variable_of('config')}]"
    )
    for name, option in options().items():
        about = option.metadata
        default = f" (default: {about['default']})" if about["default"] else ""
        about_all = f"{about['about']}{default} [{variable_of(name)}]"
        parser.add_argument(flag_of(name), metavar=about["metavar"], help=about_all)


class Reading(NamedTuple):
    """What all sources say together."""

    config: Config
    """With defaults in place of mistakes."""
    mistakes: tuple[str, ...] = ()
    """Values that can't be used."""
    warnings: tuple[str, ...] = ()
    """What is not understood, and ignored: a newer operator may know more."""

    def usable(self) -> Config:
        """Return the configuration. Raises ConfigError with all mistakes."""
        if self.mistakes:
            raise ConfigError("; ".join(self.mistakes))
        return self.config


def read(arguments: Mapping[str, str | None], environ: Mapping[str, str]) -> Reading:
    """Merge all sources. ``arguments`` maps field names, and ``config``, to what the flags said."""
    path = arguments.get("config") or environ.get(variable_of("config")) or ""
    unread: list[str] = []
    in_file: Mapping[str, Any] = {}
    try:
        in_file = read_yaml(path, read_text(path)) if path else {}
    except (ConfigError, ValueError) as error:
        unread.append(str(error))
    readers = {name: option.metadata["parse"] for name, option in options().items()}
    file = Source(lambda name: f"{path}: {name}", in_file)
    values, mistakes = read_values(readers, [Source(flag_of, arguments), environment(readers, environ), file])
    config = Config(**values)
    if not config.remote_url and config.has_credential_files:
        mistakes.append("a user name or password for the remote tier was given, but no --remote-url")
    if config.remote_shards_file and not (config.remote_url and config.remote_url.kind is Kind.SHARDS):
        mistakes.append("--remote-shards-file needs --remote-url with redis:// or rediss://")
    if config.memory_capacity < config.memory_size:
        mistakes.append("--memory-max-size must not be less than --memory-size")
    warnings = (*unknown_keys(path, in_file, readers), *suspect_variables(environ))
    return Reading(config, (*unread, *mistakes), warnings)


def suspect_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Sentences about variables that look like a mistyped option.

    Only close matches: Kubernetes itself sets LMCACHE_..._SERVICE_HOST where a Service has such a name.
    """
    known = [variable_of("config"), *map(variable_of, options())]
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in known:
            for nearest in difflib.get_close_matches(name, known, n=1, cutoff=0.85):
                yield f"environment variable {name} is not known; did you mean {nearest}?"
