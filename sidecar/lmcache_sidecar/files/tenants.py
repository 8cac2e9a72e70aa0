"""Budgets of tenants, in a file that the sidecar re-reads while it runs.

.. code-block:: yaml

    default: {memoryPercent: 50}
    named:
    - name: search
      saltHash: 2599f24d64ea56eaf777abb3eab9a6f7d117d17515c0481a1e7ba92fad5a21b9
      minMemoryPercent: 20
    - name: batch
      saltFile: /etc/lmcache/salts/batch
      memoryPercent: 30
      lowerTierBytes: 100Gi
      priority: -10
      retainPercent: 0

A tenant is named by the hash of its cache salt (``lmcache-sidecar salt-hash``), or by a file with the salt.

If a file with a salt is missing, its last content counts. If there was none, this tenant has the default
budget, and all other tenants have theirs. If two tenants have the same salt, only the first has its budget.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from lmcache_sidecar.config import PERCENT, ConfigError, read_text
from lmcache_sidecar.files.watched_files import FollowedFile
from lmcache_store import keys
from lmcache_store.common import options
from lmcache_store.common.options import read_yaml
from lmcache_store.common.recent import Recent
from lmcache_store.common.units import parse_size
from lmcache_store.tenant_names import DEFAULT_NAME, MAX_CHARACTERS, MAX_NAMED, is_name
from lmcache_store.tiers.budgets import NO_SALT, Budget, SaltedBudgets

logger = logging.getLogger(__name__)

MAX_NAMESPACES = 64
"""Namespaces whose tenants have budgets: those that attached most recently."""

MAX_DISK_BYTES = 1 << 50
"""Largest bound of a tenant on disk, as in the spec. Metrics cannot show a number of any length."""

_HASH = re.compile(r"[0-9a-f]{64}")


def _disk_bytes(text: str) -> int:
    num_bytes = 0 if text == "0" else parse_size(text)
    if num_bytes > MAX_DISK_BYTES:
        raise ValueError(f"must be at most {MAX_DISK_BYTES >> 40}Ti")
    return num_bytes


_LIMITS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "memoryPercent": ("memory_percent", options.number(int, 1, 100, "a percentage from 1 to 100")),
    "minMemoryPercent": ("min_memory_percent", PERCENT),
    "lowerTierBytes": ("disk_bytes", _disk_bytes),
    "priority": ("priority", options.number(int, -100, 100, "a priority from -100 to 100")),
    "retainPercent": ("retain_percent", PERCENT),
}
"""Fields of Budget by their keys in the file, with the readers of their values."""


class _Salt(NamedTuple):
    """Content of a file with a salt."""

    text: str | None
    """The present salt, or else the last one; None: there was none so far."""
    problem: str
    """Reason why there is no present salt; empty if there is one."""


class TenantsFile(FollowedFile):
    """The tenants file, and the budgets in use. An empty ``path`` means no file.

    ``plain`` is the budget of requests without a salt. Tenants have its ``retain_percent`` by default.
    ``follow`` runs in a thread; all other methods belong to the event loop.
    """

    def __init__(self, path: str, plain: Budget = NO_SALT) -> None:
        super().__init__(path)
        self._plain = plain
        self.salted = SaltedBudgets(plain, no_salt=plain)
        """Budgets of the text in use."""
        self._salts: dict[str, str | None] = {}  # salts by their files; None: the file is not readable
        self._last_salts: dict[str, str] = {}  # of the files that the text in use names
        self._failed: list[str] = []  # problems of tenants whose salts cannot be used
        self._namespaces: Recent[bytes, None] = Recent(MAX_NAMESPACES)
        self._resolved: SaltedBudgets | None = None  # the source of ``budgets``
        self.digest = ""
        """SHA-256 of the text in use, in hexadecimal; empty: no text was valid so far. The text has hashes
        and files of salts, but no salts."""
        self.budgets = self.salted.resolve(())
        """Budgets of the tenants in all known namespaces, since the last ``resolve``."""

    def follow(self) -> None:
        """Read the file, if there is one, and the files with salts that it names."""
        if any(_read_salt(path) != salt for path, salt in self._salts.items()):
            self._last = None
        former = self.problem
        super().follow()
        if self._failed and not self.problem:
            self.problem = self._failed[0]
            if self.problem != former:
                logger.error(
                    "%s is %s, without tenants whose salts cannot be used: %s", *self.used, self.problem
                )

    def use(self, text: str) -> None:
        """Use the budgets of this text. Raises ValueError, naming file and key."""
        self._salts, failed = {}, list[str]()
        self.salted = _parse(self.path, text, self._plain, self._salt_of, failed)
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self._failed = failed
        self._last_salts = {path: salt for path, salt in self._last_salts.items() if path in self._salts}

    def _salt_of(self, path: str) -> _Salt:
        salt = self._salts[path] = _read_salt(path)
        if salt:
            self._last_salts[path] = salt
            return _Salt(salt, "")
        no_file = "can't be read: check that the Secret exists and is mounted"
        shown = path.encode(errors="backslashreplace").decode()  # a lone surrogate is no text for logs
        problem = f"{shown} " + (no_file if salt is None else "is empty: write the tenant's salt")
        return _Salt(self._last_salts.get(path), problem)

    @property
    def used(self) -> tuple[str, str]:
        """Subject and present value, for the log: names only."""
        names = [budget.name for budget in self.salted.listed]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return "The list of tenants with budgets", shown

    def add_namespace(self, namespace: bytes) -> bool:
        """Apply the budgets to the tenants of this namespace, too. Returns whether it is a new one."""
        is_new = namespace not in self._namespaces
        self._namespaces[namespace] = None
        if is_new:
            self._resolved = None
        return is_new

    def resolve(self) -> bool:
        """Update ``budgets`` after ``follow`` or ``add_namespace``. Returns whether something changed."""
        salted = self.salted
        if salted is self._resolved:
            return False
        self._resolved, self.budgets = salted, salted.resolve(tuple(self._namespaces))
        return True


def print_salt_hash() -> int:
    """Read a salt from standard input and print its hash. Raises ConfigError if there is none."""
    try:
        salt = _without_newline(sys.stdin.buffer.read().decode())
    except UnicodeDecodeError:
        raise ConfigError("the salt on standard input is not UTF-8 text") from None
    if not salt:
        raise ConfigError("no salt: write it to standard input, as in 'lmcache-sidecar salt-hash < FILE'")
    print(keys.salt_hash(salt).hex())
    return 0


def _read_salt(path: str) -> str | None:
    try:
        return _without_newline(read_text(path))
    except ConfigError:
        return None


def _without_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _parse(
    path: str, text: str, plain: Budget, salt_of: Callable[[str], _Salt], failed: list[str]
) -> SaltedBudgets:
    """Return the budgets of a file. Appends the problems of salts that cannot be used to ``failed``."""
    content = read_yaml(path, text)
    _refuse_unknown(path, content, ("default", "named"))
    default = _budget(f"{path}: default", content.get("default") or {}, plain)
    named = content.get("named") or []
    if not isinstance(named, list):
        raise ValueError(f"{path}: named: must be a list of up to {MAX_NAMED} tenants")
    if len(named) > MAX_NAMED:
        raise ValueError(
            f"{path}: named: the list has {len(named)} tenants: reduce it to at most {MAX_NAMED}. Tenants"
            f" without an entry have the budget {DEFAULT_NAME}"
        )
    budgets: dict[bytes, Budget] = {}
    names, total = set[str](), default.min_memory_percent
    for number, entry in enumerate(named):
        where = f"{path}: named[{number}]"
        hashed, budget = _tenant(where, entry, default, salt_of, failed)
        if budget.name in names:
            raise ValueError(f"{where}: name {budget.name!r} is used twice: give each tenant another name")
        names.add(budget.name)
        total += budget.min_memory_percent  # also if the salt cannot be used: the Secret may change later
        if hashed is None:
            continue
        if (first := budgets.setdefault(hashed, budget)) is not budget:
            failed.append(
                f"{where} ({budget.name}): has the same salt as {first.name}, whose budget counts: give each"
                " tenant its own salt, or remove one of them"
            )
    if total > 100:
        raise ValueError(f"{path}: the sum of all minMemoryPercent is {total}: reduce it to at most 100")
    return SaltedBudgets(default, budgets, plain)


def _tenant(
    where: str, entry: object, default: Budget, salt_of: Callable[[str], _Salt], failed: list[str]
) -> tuple[bytes | None, Budget]:
    """Return the hash of a named tenant's salt, and its budget. None: its salt is missing."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: must hold keys and values, such as 'name: search'")
    identity = {key: value for key, value in entry.items() if key in ("name", "saltHash", "saltFile")}
    name, hashed, file = (identity.get(key) for key in ("name", "saltHash", "saltFile"))
    if not is_name(name) or name == DEFAULT_NAME:
        raise ValueError(
            f"{where}: name: write up to {MAX_CHARACTERS} lower-case letters, digits and '-', other than"
            f" {DEFAULT_NAME!r}"
        )
    limits = {key: value for key, value in entry.items() if key not in identity}
    base = Budget(name, default.memory_percent, retain_percent=default.retain_percent)
    budget = _budget(f"{where} ({name})", limits, base)
    if (hashed is None) == (file is None):
        raise ValueError(f"{where} ({name}): set either saltHash or saltFile")
    if file is not None:
        if not isinstance(file, str) or not file:
            raise ValueError(f"{where} ({name}): saltFile: must be the path of a file")
        salt = salt_of(file)
        failed += [f"{where} ({name}): saltFile: {salt.problem}"] if salt.problem else []
        return None if salt.text is None else keys.salt_hash(salt.text), budget
    if not isinstance(hashed, str) or not _HASH.fullmatch(hashed):
        raise ValueError(
            f"{where} ({name}): saltHash: must be 64 hexadecimal digits: run 'lmcache-sidecar salt-hash'"
        )
    return bytes.fromhex(hashed), budget


def _budget(where: str, limits: object, base: Budget) -> Budget:
    """Return ``base`` with the limits that are set."""
    if not isinstance(limits, dict):
        raise ValueError(f"{where}: must hold keys and values, such as 'memoryPercent: 50'")
    _refuse_unknown(where, limits, tuple(_LIMITS))
    values: dict[str, Any] = {}
    for key, text in limits.items():
        name, reader = _LIMITS[key]
        try:
            values[name] = reader(text if isinstance(text, str) else "")
        except ValueError as error:
            raise ValueError(f"{where}: {key}: {error}") from None
    budget = replace(base, **values)
    if budget.min_memory_percent > budget.memory_percent:
        raise ValueError(
            f"{where}: minMemoryPercent {budget.min_memory_percent} is more than memoryPercent"
            f" {budget.memory_percent}: reduce it, or increase memoryPercent"
        )
    return budget


def _refuse_unknown(where: str, content: Mapping[str, object], known: tuple[str, ...]) -> None:
    for sentence in options.unknown_keys(where, content, known):
        raise ValueError(sentence.replace(", and ignored", "").replace("is ignored", "is unknown"))
