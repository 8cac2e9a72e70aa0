"""Configuration: one field per option, taken from flag > environment > file > default.

A field's name is its YAML key; ``--memory-size`` and ``LMCACHE_MEMORY_SIZE`` are made of it. All sources go
through the same parser, so a mistake reads the same wherever it was made.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from lmcache.rpc.service import DEFAULT_SOCKET, check_socket_path
from lmcache.tiers.remote.address import Address
from lmcache.units import parse_size

ENV_PREFIX = "LMCACHE_"


class ConfigError(Exception):
    """The configuration can't be used; one line that names the source, the value and the cure."""


def _number(kind: Callable[[str], float], limit: int, what: str, least: float = 0) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = kind(text) if re.fullmatch(r"[0-9.]+", text) else -1
        except ValueError:
            number = -1
        if not least <= number <= limit:
            raise ValueError(f"{text!r} is not {what}")
        return number

    return parse


def _checked(check: Callable[[str], object]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        check(text)
        return text

    return parse


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is not true or false")
    return text == "true"


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


_SOCKET = _checked(check_socket_path)
_URL = _checked(lambda url: url and Address.parse(url))
_PORT = _number(int, 65535, "a port: write a number from 1 to 65535, or 0 for any free one")
_DEADLINE = _number(float, 60, "a number of seconds from 0.01 to 60", least=0.01)
_NODE = _number(int, 1023, "a NUMA node: write its number, 0 is the first")
_SECONDS = _number(float, 3600, "a number of seconds from 0 to 3600")
_NICENESS = _number(int, 19, "a niceness from 0 to 19")


def _option(metavar: str, default: str, parse: Callable[[str], Any], about: str) -> Any:
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
    huge_pages: bool = _option("BOOL", "false", _switch,
        "true: take huge pages for the memory tier where the kernel has them: faster copies, a slower start")
    numa_node: int | None = _option("NODE", "", lambda text: _NODE(text) if text else None,
        "NUMA node to take the memory tier's pages from, while it has any; empty: as the kernel likes")
    disk_path: str = _option("PATH", "", str,
        "directory of the disk tier, used by this sidecar alone; empty: no disk tier")
    disk_size: int = _option("SIZE", "10Gi", parse_size,
        "size of the disk tier, at most nine tenths of its volume")
    admit: str = _option("POLICY", "All", _one_of("All", "OnReuse"),
        "which chunks go to disk and remote tier: All, or OnReuse, those that were hit once in memory")
    remote_url: str = _option("URL", "", _URL,
        "Redis or Valkey that all pods share: redis://host:port/db or unix:///path; several hosts with commas"
        " are shards; also rediss:// (TLS), redis-sentinel:// and redis-cluster://; empty: no remote tier")
    remote_timeout_seconds: float = _option("SECONDS", "1", _DEADLINE,
        "deadline of a connection to the remote tier, and of each part (4 MiB) read or written")
    remote_username_file: str = _option("FILE", "", str,
        "file with the user name for the remote tier; empty: the default user")
    remote_password_file: str = _option("FILE", "", str,
        "file with the password for the remote tier; empty: no password")
    drain_grace_seconds: float = _option("SECONDS", "20", _SECONDS,
        "how long a stopping sidecar goes on writing what is queued for disk and remote tier")
    stay_up: bool = _option("BOOL", "false", _switch,
        "true, as in the image: a sidecar that can't run does not exit, since that would take its pod out of"
        " service; it says why in /readyz, and tries again")
    http_host: str = _option("ADDRESS", "", str,
        "address of the read-only HTTP server; empty: every address, of IPv4 and IPv6")
    http_port: int = _option("PORT", "9464", _PORT,
        "port of /metrics, /stats, /healthz and /readyz; 0: any free one, see the log")
    log_format: str = _option("FORMAT", "text", _one_of("text", "json"), "text or json")
    log_level: str = _option("LEVEL", "info", _one_of("debug", "info", "warning", "error"),
        "debug, info, warning or error")
    # fmt: on

    @property
    def arena_path(self) -> str:
        """Where the arena lies."""
        return self.arena or str(Path(self.socket).parent / "arena")

    @property
    def has_credential_files(self) -> bool:
        """Are user name or password of the remote tier in files?"""
        return bool(self.remote_username_file or self.remote_password_file)

    def read_credentials(self) -> tuple[str, str]:
        """User name and password of the remote tier as its files say now. Raises ConfigError."""
        return (
            _read_secret("remote_username_file", self.remote_username_file),
            _read_secret("remote_password_file", self.remote_password_file),
        )


def _read_secret(name: str, path: str) -> str:
    return _read(path, f"{flag_of(name)}: ").strip() if path else ""


def _read(path: str, source: str = "") -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise ConfigError(f"{source}{path} can't be read: {reason}") from error


def flag_of(name: str) -> str:
    """The command line's name of a field."""
    return "--" + name.replace("_", "-")


def env_of(name: str) -> str:
    """The environment's name of a field."""
    return ENV_PREFIX + name.upper()


def options() -> dict[str, Field[Any]]:
    """Fields by name."""
    return {option.name: option for option in fields(Config)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field. Values stay text: ``load`` parses them."""
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file with the options below as keys [{ENV_PREFIX}CONFIG]"
    )
    for name, option in options().items():
        about = option.metadata
        default = f" (default: {about['default']})" if about["default"] else ""
        about_all = f"{about['about']}{default} [{env_of(name)}]"
        parser.add_argument(flag_of(name), metavar=about["metavar"], help=about_all)


class Reading(NamedTuple):
    """What all sources say together."""

    config: Config  # with defaults in place of mistakes
    mistakes: tuple[str, ...] = ()  # values that can't be used
    warnings: tuple[str, ...] = ()  # what is not understood, and ignored: a newer operator may know more


def read(arguments: Mapping[str, str | None], environ: Mapping[str, str]) -> Reading:
    """Merge all sources. ``arguments`` maps field names, and ``config``, to what the flags said."""
    mistakes: list[str] = []
    path = arguments.get("config") or environ.get(f"{ENV_PREFIX}CONFIG") or ""
    in_file: Mapping[str, Any] = {}
    try:
        in_file = _read_file(path) if path else {}
    except ConfigError as error:
        mistakes.append(str(error))
    values: dict[str, Any] = {}
    for name, option in options().items():
        for source, text in (
            (flag_of(name), arguments.get(name)),
            (env_of(name), environ.get(env_of(name))),
            (f"{path}: {name}", in_file.get(name)),
        ):
            if text is not None:
                try:
                    values[name] = option.metadata["parse"](_single(text))
                except ValueError as error:
                    mistakes.append(f"{source}: {error}")
                break
    config = Config(**values)
    if not config.remote_url and config.has_credential_files:
        mistakes.append("a user name or password for the remote tier was given, but no --remote-url")
    warnings = (*_unknown_keys(path, in_file), *suspect_variables(environ))
    return Reading(config, tuple(mistakes), warnings)


def _single(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("this must be a single value")
    return value


def load(arguments: Mapping[str, str | None], environ: Mapping[str, str]) -> Config:
    """Do as ``read`` does, and raise ConfigError for mistakes."""
    reading = read(arguments, environ)
    if reading.mistakes:
        raise ConfigError("; ".join(reading.mistakes))
    return reading.config


def suspect_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Sentences about variables that look like a mistyped option.

    Only close matches: Kubernetes itself sets LMCACHE_..._SERVICE_HOST where a Service has such a name.
    """
    known = [f"{ENV_PREFIX}CONFIG", *map(env_of, options())]
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in known:
            for nearest in difflib.get_close_matches(name, known, n=1, cutoff=0.85):
                yield f"environment variable {name} is not known; did you mean {nearest}?"


def _unknown_keys(path: str, in_file: Mapping[str, Any]) -> Iterator[str]:
    """Sentences; a key that is no word may be anything, even a secret on the wrong side of a colon."""
    for key in in_file.keys() - options().keys():
        if not re.fullmatch(r"[\w-]{1,64}", key):
            yield f"{path}: a key that is no word is ignored"
            continue
        nearest = difflib.get_close_matches(key.replace("-", "_"), options(), n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        yield f"{path}: key {key!r} is unknown, and ignored{hint}"


def _read_file(path: str) -> dict[str, Any]:
    """Keys and values as they are written: the parsers of the options know what they mean."""
    import yaml  # a twentieth of the start, for those who have a file

    text = _read(path)
    try:
        loaded = yaml.load(text, yaml.BaseLoader)  # makes nothing but text
    except (yaml.YAMLError, RecursionError) as error:
        # The parser's own words may quote the file, which may hold a password.
        mark = getattr(error, "problem_mark", None)
        where = f", look at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path} is not YAML{where}") from None
    if not isinstance(loaded or {}, dict):
        raise ConfigError(f"{path} must hold keys and values, as in 'memory_size: 4Gi'")
    return loaded or {}
