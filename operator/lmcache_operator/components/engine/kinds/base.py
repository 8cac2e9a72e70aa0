"""The contract of an engine kind, which is an inference engine that the operator can run. Pure.

Everything that differs between vLLM and SGLang is in an implementation of this class: the command line, the
options that the cache depends on, the probes, and the recognition of containers that run the engine.
"""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from lmcache_operator.api.engine_kinds import EngineApi
from lmcache_operator.api.parse import Cluster
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs import Object


class KindProblem(NamedTuple):
    """A problem of an engine that doctor reports."""

    is_failure: bool
    """Whether the engine runs without its cache."""
    statement: str
    remedy: str


ONE_POD = "an engine is one pod with the ranks of spec.engine.parallelism; for more set spec.engine.replicas"
NODES = "to spread an engine over pods, set only spec.engine.nodes"
ONE_INJECTED_POD = "an injected engine is one pod; for more engines run more pods"
NO_CACHE = "the engine would run without its cache"
ON_A_PORT = "the probes and Services expect the engine's HTTP server on a port"
ALL_ADDRESSES = "the probes and Services expect the engine on all addresses"
NO_SPLIT = (
    "to split prefill and decode over pods, set spec.engine.prefill for vLLM; no other split is possible"
)
NO_FILE = "a file may hold options that can't be set: write each into spec.engine.args"


class EngineKind(ABC):
    """An inference engine that the operator can run, and that can get the cache by injection."""

    api: ClassVar[EngineApi]
    """The kind in the API."""
    command: ClassVar[tuple[str, ...]]
    """Command of the engine's container."""
    variables: ClassVar[Mapping[str, str]] = {}
    """Variables that the cache needs, in addition to those that every kind has."""
    reserved: ClassVar[Mapping[str, str]]
    """Reasons why the user may not set an option in ``spec.engine.args``, by option."""
    reserved_by_injection: ClassVar[Mapping[str, str]]
    """Reasons why an injected pod must not set an option, by option."""
    reserved_annotation: ClassVar[str]
    """Annotation of the LMCacheProfile with a line for each of these options."""
    read: ClassVar[tuple[str, ...]]
    """Options that are also recognized in abbreviated form. Includes all of ``reserved``."""
    stray_word: ClassVar[str]
    """Reaction of the engine to an argument that belongs to no option, as the end of a sentence."""
    default_port: ClassVar[int]
    """Port of the HTTP server if the command line names none."""
    health_seconds: ClassVar[int]
    """Longest time that a healthy engine may take to answer ``/health``."""
    can_share_gpus: ClassVar[bool]
    """Whether a sidecar can copy KV out of the engine's GPUs."""
    launcher: ClassVar[re.Pattern[str]]
    """Command that starts the engine, in a container's words joined by newlines."""
    shell_commands: ClassVar[tuple[str, ...]]
    """The same inside a line for a shell. The first is written in messages."""
    image: ClassVar[re.Pattern[str]]
    """Names of published images."""
    pages: ClassVar[tuple[str, ...]]
    """Paths of the engine's HTTP server that have its version and settings."""
    certificate = "--ssl-certfile"
    """Option that makes the engine serve HTTPS only."""

    @property
    def name(self) -> str:
        """Value of ``spec.engine.kind``, and the name of the engine in messages."""
        return self.api.name

    @abstractmethod
    def cache_args(self, cluster: Cluster) -> list[str]:
        """The arguments that give the engine its cache, each as ``--name=value`` or as a flag.

        Injection adds the same arguments. If the user sets an option of them that is not reserved, the user's
        value is used.
        """

    @abstractmethod
    def args(self, cluster: Cluster, shutdown_seconds: int, has_reader: bool = False) -> list[str]:
        """The arguments of the engine's container: the operator's by name, then the user's in their order.

        ``shutdown_seconds``: time for a stopping engine to finish its requests. ``has_reader``: a process of
        the sidecar takes memory of each GPU.

        Raises:
            InvalidSpecError: an argument of the user breaks what the cache needs.
        """

    # -- doctor

    @abstractmethod
    def read_pages(self, bodies: Sequence[bytes]) -> dict[str, Any]:
        """``version`` and ``cache``, the settings as texts, from the answers at ``pages``.

        An empty body is a failed answer.
        """

    @abstractmethod
    def argument_problems(self, container: Object, *, is_shared: bool) -> Iterator[KindProblem]:
        """The problems in arguments and variables. ``is_shared``: a client's keys are not private."""

    @abstractmethod
    def supports(self, version: str) -> bool:
        """Whether the cache works with a version, as the engine reports it."""

    @abstractmethod
    def setting_problems(self, cache: Mapping[str, Any], chunk_tokens: int) -> Iterator[KindProblem]:
        """The problems in the settings. ``chunk_tokens``: size of a chunk in the spec; 0: none."""

    @abstractmethod
    def settings(self, cache: Mapping[str, Any]) -> str:
        """The settings without problems, as a sentence."""

    # -- with a default

    def variables_of(self, cluster: Cluster) -> Mapping[str, str]:
        """The variables that the engine's container needs for the cache and for the settings of the spec."""
        return self.variables

    def shutdown_seconds(self, args: Sequence[str]) -> int | None:
        """Time to finish requests that the user's arguments set; None: they set none."""
        return None

    def flag_of(self, arg: str) -> str:
        """The option that an argument sets, without its value, and with ``-`` for ``_``.

        Engines accept any unambiguous prefix of an option. A prefix that fits an option of ``read`` counts as
        that option.
        """
        name = arg.partition("=")[0]
        if not name.startswith("-") or name in ("-", "--"):
            return name
        name = name.replace("_", "-")
        return name if name in self.read else next((o for o in self.read if o.startswith(name)), name)

    def option(self, args: Sequence[str], name: str) -> str | None:
        """Value of an option in the arguments; the last one counts. None if the option is not set."""
        value = None
        for index, arg in enumerate(args):
            if self.flag_of(arg) == name:
                _, has_value, text = arg.partition("=")
                value = text if has_value else "".join(args[index + 1 : index + 2])
        return value

    def int_option(self, args: Sequence[str], name: str) -> int | None:
        """Value of an integer option in the arguments; None if it is not set or not an integer."""
        text = self.option(args, name)
        return int(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else None

    def checked_flags(self, args: Sequence[str]) -> list[str]:
        """The option that each argument of the user sets.

        Raises:
            InvalidSpecError: an option is reserved, or an argument belongs to no option.
        """
        flags = [self.flag_of(arg) for arg in args]
        may_be_value = False
        for index, (arg, flag) in enumerate(zip(args, flags, strict=True)):
            path = f"spec.engine.args[{index}]"
            if flag in self.reserved:
                raise InvalidSpecError(path, f"{flag} can't be set: {self.reserved[flag]}")
            if not arg.startswith("-") and not may_be_value:
                raise InvalidSpecError(path, f"{arg!r} belongs to no option: {self.stray_word}")
            may_be_value = "=" not in arg if arg.startswith("-") else may_be_value
        return flags

    def is_mentioned(self, container: Object) -> bool:
        """Whether a container certainly runs the engine, by its command or, without a command, its image."""
        words, line = words_of(container), rf"\b({'|'.join(map(re.escape, self.shell_commands))})\b"
        if self.launcher.search("\n".join(words)) or any(re.search(line, word) for word in words):
            return True
        return not container.get("command") and self.has_image(container)

    def has_image(self, container: Object) -> bool:
        """Whether the container's image is a published image of the engine."""
        return self.image.fullmatch(container.get("image") or "") is not None


def refused(flags: Sequence[str], option: str, sentence: str) -> InvalidSpecError:
    """The error about an option among those that the user's arguments set."""
    return InvalidSpecError(f"spec.engine.args[{flags.index(option)}]", sentence)


def option_name(arg: str) -> str:
    """Name of the option in an argument that the operator wrote."""
    return arg.partition("=")[0]


def object_of(text: str | bytes) -> dict[str, Any] | None:
    """The object of a JSON text; None if it is invalid, or another value."""
    with contextlib.suppress(ValueError, RecursionError):
        return value if isinstance(value := json.loads(text), dict) else None
    return None


def words_of(container: Object) -> list[str]:
    """Command and arguments of a container."""
    return [str(word) for word in (*(container.get("command") or ()), *(container.get("args") or ()))]
