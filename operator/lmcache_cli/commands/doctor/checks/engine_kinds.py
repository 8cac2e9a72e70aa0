"""Checks of each kind of engine: arguments, versions and settings. Pure."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from lmcache_cli.commands.doctor.results import Result, failure, warning
from lmcache_operator.components.engine.kinds import KINDS, kind_in
from lmcache_operator.components.engine.kinds.base import EngineKind, words_of
from lmcache_operator.components.engine.kinds.sglang import BACKEND, BACKEND_CONFIG, NO_RADIX_CACHE
from lmcache_operator.specs import Object
from lmcache_store.common.text import plain

MIN_VLLM, MAX_VLLM = (0, 29), (0, 33)
"""Oldest and newest supported version of vLLM. A test compares them with the connector."""
SGLANG_VERSION = "0.5.23"
"""Supported version of SGLang. A test compares it with the storage backend."""
_HASH_ALGORITHM = "sha256_cbor"
_WITHOUT_PREFIXES = "every prefix is loaded again, and models with recurrent states are not cached."
_RUNBOOK = "EngineNotAttached"
_METRIC = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'([a-z_]{1,64})="((?:[^"\\]|\\.){0,256})"')
_SETTINGS = ("disable_radix_cache", "enable_hierarchical_cache", "hicache_storage_backend", "page_size")


class KindChecks(ABC):
    """The checks of one kind of engine."""

    kind: ClassVar[EngineKind]
    paths: ClassVar[tuple[str, ...]]
    """Paths of the engine's HTTP server that have its version and settings."""

    @abstractmethod
    def read(self, bodies: Sequence[bytes]) -> dict[str, Any]:
        """Return ``version`` and ``cache``, the settings as texts, from the answers at ``paths``.

        An empty body is a failed answer.
        """

    @abstractmethod
    def argument_problems(self, name: str, container: Object, *, is_shared: bool) -> Iterator[Result]:
        """Yield the problems in arguments and variables. ``is_shared``: a client's keys are not private."""

    @abstractmethod
    def version_problem(self, name: str, version: str) -> Result | None:
        """Return the problem of a version; None: it is supported."""

    @abstractmethod
    def setting_problems(self, name: str, cache: Mapping[str, Any], chunk_tokens: int) -> Iterator[Result]:
        """Yield the problems in the settings. ``chunk_tokens``: size of a chunk in the spec; 0: none."""

    @abstractmethod
    def settings(self, cache: Mapping[str, Any]) -> str:
        """Return the settings without problems, as a sentence."""


class VllmChecks(KindChecks):
    """Checks of vLLM."""

    kind = KINDS[0]
    paths = ("/version", "/metrics")

    def read(self, bodies: Sequence[bytes]) -> dict[str, Any]:
        """Return the version, and the labels of vLLM's metric about its cache."""
        version, metrics = bodies
        facts: dict[str, Any] = {"version": plain(_object(version).get("version"))}
        if config := _METRIC.search(metrics.decode(errors="replace")):
            facts["cache"] = dict(_LABEL.findall(config[1]))
        return facts

    def argument_problems(self, name: str, container: Object, *, is_shared: bool) -> Iterator[Result]:
        """Yield the problems of the KV connector's options, and of keys that other pods cannot use."""
        words = words_of(container)
        if "--no-enable-prefix-caching" in map(self.kind.flag_of, words):
            text = f"--no-enable-prefix-caching is set: {_WITHOUT_PREFIXES}"
            yield warning(name, text, "Remove the argument.")
        config = self.kind.option(words, "--kv-transfer-config")
        if config is None:
            return  # a shell or a file may set the options: /stats says whether the engine is attached
        yield from _connector_problems(name, config)
        algorithm = self.kind.option(words, "--prefix-caching-hash-algo")
        if algorithm != _HASH_ALGORITHM:
            value = plain(algorithm) or "not set"
            text = f"--prefix-caching-hash-algo is {value}, so keys are private to the engine."
            yield warning(name, text, f"Set --prefix-caching-hash-algo {_HASH_ALGORITHM}.")
        seed = next((each for each in container.get("env") or () if each["name"] == "PYTHONHASHSEED"), None)
        if (seed is None or seed.get("value") == "random") and not is_shared:
            text = "PYTHONHASHSEED is not set, so keys may be private to the engine."
            yield warning(name, text, "Set the variable PYTHONHASHSEED=0 in the engine's container.")

    def version_problem(self, name: str, version: str) -> Result | None:
        """Return a failure for versions that the connector does not support."""
        number = re.match(r"v?(\d{1,9})\.(\d{1,9})", version)
        if number and not MIN_VLLM <= (int(number[1]), int(number[2])) <= MAX_VLLM:
            text = f"vLLM {version} is not supported, so the engine runs without the cache."
            return failure(name, text, "Use an image with vLLM 0.29-0.33.", _RUNBOOK)
        return None

    def setting_problems(self, name: str, cache: Mapping[str, Any], chunk_tokens: int) -> Iterator[Result]:
        """Yield problems of prefix caching and of the block size."""
        if cache.get("enable_prefix_caching") == "False":
            text = f"Prefix caching is off: {_WITHOUT_PREFIXES}"
            yield warning(name, text, "Remove --no-enable-prefix-caching.")
        block = plain(cache.get("block_size"))
        if block.isdecimal() and 0 < int(block) <= 1 << 20 and chunk_tokens % int(block):
            tokens = -(-chunk_tokens // int(block)) * int(block)
            text = f"spec.sidecar.chunkTokens {chunk_tokens} is no multiple of the engine's block of {block} "
            yield warning(name, f"{text}tokens.", f"Set it to {tokens}, which the engine uses already.")

    def settings(self, cache: Mapping[str, Any]) -> str:
        """Return the block size."""
        return f"Prefix caching is on. A block has {plain(cache.get('block_size'))} tokens."


class SglangChecks(KindChecks):
    """Checks of SGLang."""

    kind = KINDS[1]
    paths = ("/server_info",)

    def read(self, bodies: Sequence[bytes]) -> dict[str, Any]:
        """Return the version, and the settings of the caches."""
        info = _object(bodies[0])
        facts: dict[str, Any] = {"version": plain(info.get("version"))}
        if cache := {name: plain(str(info[name])) for name in _SETTINGS if name in info}:
            facts["cache"] = cache
        return facts

    def argument_problems(self, name: str, container: Object, *, is_shared: bool) -> Iterator[Result]:
        """Yield the problems of the options of HiCache."""
        words = words_of(container)
        if NO_RADIX_CACHE in map(self.kind.flag_of, words):
            text = f"{NO_RADIX_CACHE} is set, so the engine has no prefixes to store."
            yield failure(name, text, "Remove the argument.", _RUNBOOK)
        config = self.kind.option(words, BACKEND_CONFIG)
        if config is None or config.startswith("@"):
            return  # a shell or a file may set the options: /stats says whether the engine is attached
        if (backend := self.kind.option(words, BACKEND)) != "dynamic":
            text = f"{BACKEND} is {plain(backend) or 'not set'}, so the engine does not load LMCache."
            yield failure(name, text, f"Set {BACKEND} dynamic.", _RUNBOOK)
        parsed = _json(config)
        if not isinstance(parsed, dict):
            yield failure(name, f"{BACKEND_CONFIG} is not a JSON object.", "Correct the argument.", _RUNBOOK)
        elif parsed.get("interface_v1") != 1:
            value = plain(str(parsed.get("interface_v1", "not set")))
            text = f"interface_v1 is {value}, but LMCache needs 1."
            yield failure(name, text, f'Set "interface_v1": 1 in {BACKEND_CONFIG}.', _RUNBOOK)

    def version_problem(self, name: str, version: str) -> Result | None:
        """Return a failure for versions that the storage backend does not support."""
        if version.split("+")[0].split(".post")[0] == SGLANG_VERSION:
            return None
        text = f"SGLang {version} is not supported, so the engine runs without the cache."
        return failure(name, text, f"Use an image with SGLang {SGLANG_VERSION}.", _RUNBOOK)

    def setting_problems(self, name: str, cache: Mapping[str, Any], chunk_tokens: int) -> Iterator[Result]:
        """Yield a problem if HiCache is off."""
        if cache.get("disable_radix_cache") == "True" or cache.get("enable_hierarchical_cache") == "False":
            text = "HiCache is off, so the engine runs without LMCache."
            remedy = f"Set --enable-hierarchical-cache, and remove {NO_RADIX_CACHE}."
            yield failure(name, text, remedy, _RUNBOOK)

    def settings(self, cache: Mapping[str, Any]) -> str:
        """Return the page size."""
        return f"HiCache is on. A page has {plain(cache.get('page_size'))} tokens."


_CHECKS = {checks.kind: checks for checks in (VllmChecks(), SglangChecks())}


def checks_for(container: Object | None) -> KindChecks:
    """Return the checks for the engine in a container. A command that is not known may start vLLM."""
    return _CHECKS[(kind_in(container) if container else None) or KINDS[0]]


def _connector_problems(name: str, config: str) -> Iterator[Result]:
    parsed = _json(config)
    if not isinstance(parsed, dict):
        yield failure(name, "--kv-transfer-config is not a JSON object.", "Correct the argument.", _RUNBOOK)
    elif (policy := parsed.get("kv_load_failure_policy")) != "recompute":
        value = plain(policy) or "not set"
        text = f"kv_load_failure_policy is {value}, so a failed load may fail its request."
        yield warning(name, text, 'Set "kv_load_failure_policy": "recompute" in --kv-transfer-config.')


def _json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _object(body: bytes) -> Mapping[str, Any]:
    parsed = _json(body)
    return parsed if isinstance(parsed, dict) else {}
