"""Configuration: one field per option, taken from flag > environment > file > default.

A field's name is its YAML key; the flag (``--memory-size``) and the variable (``LMCACHE_MEMORY_SIZE``) are
derived from it. The same parser reads all sources, so that a mistake gives the same message in each of them.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from lmcache_client.rpc.service import DEFAULT_SOCKET, check_socket_path
from lmcache_sidecar.peer_server.limits import MIN_BYTES_PER_SECOND
from lmcache_store.common import options
from lmcache_store.common.units import parse_size
from lmcache_store.tiers.remote.address import Address, AddressKind, Tls


class ConfigError(Exception):
    """The configuration can't be used. The message is one line with the source, the value and the remedy."""


_SOCKET = options.checked(check_socket_path)
_PORT = options.number(int, 0, 65535, "a port: write a number from 1 to 65535, or 0 for any free one")
_DEADLINE = options.number(float, 0.01, 60, "a number of seconds from 0.01 to 60")
PERCENT = options.number(int, 0, 100, "a percentage from 0 to 100")
_TTL = options.number(int, 1, 604_800, "a number of seconds from 1 to 604800, a week")
_NODE = options.number(int, 0, 1023, "a NUMA node: write its number, 0 is the first")


def _read_bandwidth(text: str) -> int:
    rate = parse_size(text) if text else 0
    if 0 < rate < MIN_BYTES_PER_SECOND:
        raise ValueError(f"{text!r} is below 16Mi: with a lower rate, readers would reach their deadlines")
    return rate


def _option(metavar: str, default: str, parse: options.ValueReader, about: str) -> Any:
    """Declare a field; ``default`` is text, as a user would write it."""
    return options.setting(parse(default), parse, metavar=metavar, default=default, about=about)


# fmt: off
@dataclass(frozen=True)
class Config:
    """All options of ``lmcache-sidecar serve``."""

    socket: str = _option("PATH", DEFAULT_SOCKET, _SOCKET,
        "UNIX socket for engines; its directory must exist, and both containers mount it at the same path")
    arena: str = _option("PATH", "", str,
        "file of the memory tier, on tmpfs; outlives a restart (default: 'arena' in the socket's directory)")
    memory_size: int = _option("SIZE", "1Gi", parse_size,
        "size of the memory tier: plain bytes, or with Ki, Mi, Gi, Ti")
    memory_max_size: int = _option("SIZE", "", lambda text: parse_size(text) if text else 0,
        "size to which the memory tier can grow without a restart; memory that it does not use yet costs"
        " nothing; empty: --memory-size")
    memory_size_file: str = _option("FILE", "", str,
        "file with the target size of the memory tier, a size as above; the sidecar follows its changes;"
        " empty, or while the file does not exist: --memory-size")
    memory_retain_percent: int = _option("PERCENT", "25", PERCENT,
        "part of the memory tier in which hints retain rows that would be evicted otherwise, for requests"
        " without a tenant, and for tenants whose budget sets no retainPercent; 0: hints retain nothing")
    memory_max_ttl_seconds: int = _option("SECONDS", "3600", _TTL,
        "longest time for which a hint retains rows; hints with a longer one get this time")
    tenants_file: str = _option("FILE", "", str,
        "file with the budgets of tenants; the sidecar follows its changes. Keys: default, a budget, and"
        " named, a list of budgets with a name and a saltHash or saltFile; empty: no named tenants")
    huge_pages: bool = _option("BOOL", "false", options.switch,
        "true: use huge pages for the memory tier if the kernel has them: faster copies, slower start")
    numa_node: int | None = _option("NODE", "", lambda text: _NODE(text) if text else None,
        "preferred NUMA node for the memory tier's pages; empty: that of the GPU of each rank")
    transfer: str = _option("MODE", "Auto", options.one_of("Auto", "CudaIPC", "SharedMemory"),
        "copier of stores from GPUs: with Auto or CudaIPC the sidecar if it can read the GPU, otherwise the"
        " engine; with SharedMemory always the engine")
    disk_path: str = _option("PATH", "", str,
        "directory of the disk tier, for this sidecar alone; empty: no disk tier")
    disk_size: int = _option("SIZE", "10Gi", parse_size,
        "size of the disk tier, at most nine tenths of its volume")
    disk_encryption_keys_dir: str = _option("DIR", "", str,
        "directory with the keys that encrypt rows on disk, a file for each version: its name is a number and"
        " its content has 64 hexadecimal digits; the highest version encrypts; the sidecar follows changes;"
        " empty: no encryption")
    admit: str = _option("POLICY", "All", options.one_of("All", "OnReuse"),
        "chunks to write to the disk and remote tiers: All, or OnReuse, those that were hit once in memory")
    remote_url: Address | None = _option("URL", "", lambda url: Address.parse(url) if url else None,  # noqa: RUF009
        "Redis or Valkey that all pods share: redis://host:port/db or unix:///path; several hosts with commas"
        " are shards; also rediss:// (TLS), redis-sentinel:// and redis-cluster://; empty: no remote tier")
    remote_shards_file: str = _option("FILE", "", str,
        "file with the list of the remote tier's shards; the sidecar follows its changes. Keys: current and"
        " previous, each a list of host:port, and until, the time up to which previous shards are asked, too;"
        " empty, or while the file does not exist: the hosts of the URL")
    remote_timeout_seconds: float = _option("SECONDS", "1", _DEADLINE,
        "deadline of a connection to the remote tier, and of each step of a read or write (up to 3 MiB)")
    remote_username_file: str = _option("FILE", "", str,
        "file with the user name for the remote tier; empty: the default user")
    remote_password_file: str = _option("FILE", "", str,
        "file with the password for the remote tier; empty: no password")
    remote_encryption_keys_dir: str = _option("DIR", "", str,
        "directory with the keys that encrypt rows in the remote tier, as for the disk tier; all pods that"
        " share rows need the same keys; empty: no encryption")
    remote_encryption_delay_seconds: float = _option("SECONDS", "180", options.SECONDS,
        "time after which a new key version encrypts rows of the remote tier; pods that share rows, and read"
        " the version later, miss these rows until then")
    peers_file: str = _option("FILE", "", str,
        "file with the pods whose memory tiers this sidecar reads, key peers: a list of host:port;"
        " the sidecar follows its changes; empty: no peers")
    peer_name: str = _option("HOST:PORT", "", str,
        "entry of the list that is this pod itself, which it does not ask; empty: none")
    peers_of_part: bool = _option("BOOL", "false", options.switch,
        "true: read only peers whose host names have this pod's number before the first dot; other pods of"
        " an engine have other columns")
    peer_host: str = _option("ADDRESS", "", str,
        "address on which other pods read this memory tier; empty: all IPv4 and IPv6 addresses")
    peer_port: int | None = _option("PORT", "", lambda text: _PORT(text) if text else None,
        "port on which other pods read this memory tier; 0: any free port, which the log names; empty: none")
    peer_password_file: str = _option("FILE", "", str,
        "file with the password that peers share, and on further lines passwords that are also accepted;"
        " empty: no password")
    peer_tls_dir: str = _option("DIR", "", str,
        "directory with tls.crt and tls.key of this pod, and with ca.crt, the authority of its peers; all"
        " connections between peers then use TLS; empty: no TLS")
    peer_answer_seconds: float = _option("SECONDS", "0.005", options.SECONDS,
        "time in which other pods must say which rows they have; without an answer they count as having none")
    peer_bandwidth: int = _option("SIZE", "", _read_bandwidth,
        "bytes per second that all peers together read at most, a size from 16Mi; empty: no limit")
    drain_grace_seconds: float = _option("SECONDS", "20", options.SECONDS,
        "time that a stopping sidecar has to write queued rows to the disk and remote tiers")
    stay_up: bool = _option("BOOL", "false", options.switch,
        "true, as in the image: a sidecar that can't run does not exit, which would take its pod out of"
        " service; it gives the reason in /readyz, and tries again")
    http_host: str = _option("ADDRESS", "", str,
        "address of the read-only HTTP server; empty: all IPv4 and IPv6 addresses")
    http_port: int = _option("PORT", "9464", _PORT,
        "port of /metrics, /stats, /samples, /requests, /hints, /healthz and /readyz; 0: any free port, which"
        " the log names")
    http_tokens_dir: str = _option("DIR", "", str,
        "directory whose files each have one bearer token, and may change at any time; other machines then"
        " need one of them for all pages except /healthz and /readyz; empty: no token")
    log_format: str = _option("FORMAT", "text", options.one_of("text", "json"), "text or json")
    log_level: str = _option("LEVEL", "info", options.one_of("debug", "info", "warning", "error"),
        "debug, info, warning or error")
    # fmt: on

    @property
    def arena_path(self) -> str:
        """Path of the arena's file."""
        return self.arena or str(Path(self.socket).parent / "arena")

    @property
    def memory_capacity(self) -> int:
        """Bytes to which the memory tier can grow."""
        return self.memory_max_size or self.memory_size

    @property
    def has_credential_files(self) -> bool:
        """True if the user name or the password of the remote tier is in a file."""
        return bool(self.remote_username_file or self.remote_password_file)

    @property
    def peer_tls(self) -> Tls | None:
        """Certificate of this pod, its key, and the authority of its peers; None: no TLS."""
        if not self.peer_tls_dir:
            return None
        ca, cert, key = (str(Path(self.peer_tls_dir) / name) for name in ("ca.crt", "tls.crt", "tls.key"))
        return Tls(ca, cert, key)

    def with_credentials(self, address: Address) -> Address:
        """Return the address with the present user name and password from their files, if configured.

        Raises ConfigError if a file can't be read.
        """
        username = _read_secret("remote_username_file", self.remote_username_file)
        password = _read_secret("remote_password_file", self.remote_password_file)
        return replace(
            address, username=username or address.username, password=password or address.password
        )


def _read_secret(name: str, path: str) -> str:
    return read_text(path, f"{flag_of(name)}: ").strip() if path else ""


def read_text(path: str, source: str = "") -> str:
    """Return the text of a file. Raises ConfigError, with ``source`` in front of the path."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # the last one: no text, or a path that no file can have
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise ConfigError(f"{source}{path} can't be read: {reason}") from error


def flag_of(name: str) -> str:
    """Return the command-line flag of a field."""
    return "--" + name.replace("_", "-")


FLAGS = ("--config", *(flag_of(declared.name) for declared in fields(Config)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field. The values remain text, which ``read`` parses."""
    about_file = f"YAML file with the options below as keys [{options.variable_of('config')}]"
    parser.add_argument("--config", metavar="FILE", help=about_file)
    for option in fields(Config):
        name, about = option.name, option.metadata
        default = f" (default: {about['default']})" if about["default"] else ""
        about_all = f"{about['about']}{default} [{options.variable_of(name)}]"
        parser.add_argument(flag_of(name), metavar=about["metavar"], help=about_all)


class ConfigReading(NamedTuple):
    """The merged options of all sources, with mistakes and warnings."""

    config: Config
    """Options, with defaults in place of invalid values."""
    mistakes: tuple[str, ...] = ()
    """Messages about invalid values."""
    warnings: tuple[str, ...] = ()
    """Messages about options that are ignored: unknown ones, which a newer operator may have set, and keys
    of a tier that is not configured."""

    def usable(self) -> Config:
        """Return the configuration. Raises ConfigError with all mistakes."""
        if self.mistakes:
            raise ConfigError("; ".join(self.mistakes))
        return self.config


def read(arguments: Mapping[str, str | None], environ: Mapping[str, str]) -> ConfigReading:
    """Merge all sources. ``arguments`` maps field names, and ``config``, to the values of the flags."""
    path = arguments.get("config") or environ.get(options.variable_of("config")) or ""
    file_mistakes: list[str] = []
    in_file: Mapping[str, Any] = {}
    try:
        in_file = options.read_yaml(path, read_text(path)) if path else {}
    except (ConfigError, ValueError) as error:
        file_mistakes.append(str(error))
    readers = options.readers_of(Config)
    file = options.Source(lambda name: f"{path}: {name}", in_file)
    sources = options.Source(flag_of, arguments), options.environment(readers, environ), file
    values, mistakes = options.read_values(readers, sources)
    config = Config(**values)
    if not config.remote_url and config.has_credential_files:
        mistakes.append("--remote-username-file and --remote-password-file need --remote-url")
    if config.remote_shards_file and not (config.remote_url and config.remote_url.kind is AddressKind.SHARDS):
        mistakes.append("--remote-shards-file needs --remote-url with redis:// or rediss://")
    if config.memory_capacity < config.memory_size:
        mistakes.append("--memory-max-size must not be less than --memory-size")
    unknown = *options.unknown_keys(path, in_file, readers), *suspect_variables(environ)
    return ConfigReading(config, (*file_mistakes, *mistakes), (*unknown, *unused_keys(config)))


def unused_keys(config: Config) -> Iterator[str]:
    """Return messages about encryption keys of a tier that is not configured.

    These are no mistakes: a tier that does not exist writes no rows, and the operator may have removed it
    from the spec of a pod that still mounts its keys.
    """
    if config.disk_encryption_keys_dir and not config.disk_path:
        yield "--disk-encryption-keys-dir has no effect without --disk-path"
    if config.remote_encryption_keys_dir and not config.remote_url:
        yield "--remote-encryption-keys-dir has no effect without --remote-url"


def suspect_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Return messages about environment variables that look like a mistyped option.

    Reports only close matches: Kubernetes sets LMCACHE_..._SERVICE_HOST if a Service has such a name.
    """
    known = [options.variable_of("config"), *map(options.variable_of, options.readers_of(Config))]
    for name in environ:
        if name.startswith(options.ENV_PREFIX) and name not in known:
            for nearest in difflib.get_close_matches(name, known, n=1, cutoff=0.85):
                yield f"environment variable {name} is unknown; did you mean {nearest}?"
