"""Regular expressions for images and remote URLs, with the same meaning in Python and CEL (RE2).

The sidecar must accept every URL that matches. Otherwise a pod would run without its cache.
"""

from __future__ import annotations

_REGISTRY = r"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(:[0-9]{1,5})?/"
_WORD = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_TAG, _DIGEST = r":[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", r"@[a-z0-9]+:[0-9a-f]{32,128}"
IMAGE = rf"^({_REGISTRY})?{_WORD}(/{_WORD})*({_TAG})?({_DIGEST})?$"

_PORT = (
    r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"  # 1 to 65535
)
_HOST = rf"([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(:{_PORT})?"
_HOSTS = rf"{_HOST}(,{_HOST})*"
_DATABASE = r"(/[0-9]{1,9})?"
_PREFIX, _VERIFY = r"prefix=[A-Za-z0-9_.-]{1,64}", "verify=(full|ca|none)"


def _forms(scheme: str) -> str:
    one_or_shards = rf"{scheme}://{_HOSTS}{_DATABASE}"
    sentinel = rf"{scheme}-sentinel://{_HOSTS}/[A-Za-z0-9._-]+{_DATABASE}"
    return rf"({one_or_shards}|{sentinel}|{scheme}-cluster://{_HOSTS})"


REMOTE_URL = (
    rf"^({_forms('redis')}(\?{_PREFIX})?"
    rf"|{_forms('rediss')}(\?({_PREFIX}|{_VERIFY}|{_PREFIX}&{_VERIFY}|{_VERIFY}&{_PREFIX}))?)$"
)


def hosts_of(remote_url: str) -> list[str]:
    """Return the hosts of a remote URL, each with its port."""
    scheme, _, rest = remote_url.partition("://")
    port = "26379" if scheme.endswith("-sentinel") else "6379"
    hosts = rest.partition("?")[0].partition("/")[0].split(",")
    return [host if host.rpartition("]")[2].count(":") else f"{host}:{port}" for host in hosts]
