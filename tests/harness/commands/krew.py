"""The rules of krew for a plugin's manifest, of the format v1alpha2."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_VERSION = re.compile(r"v\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?")
_FIELDS = {"version", "homepage", "shortDescription", "description", "caveats", "platforms"}
_PLATFORM_FIELDS = {"selector", "uri", "sha256", "bin", "files"}
_SYSTEMS, _PROCESSORS = {"linux", "darwin", "windows"}, {"amd64", "arm64", "arm", "386", "ppc64le", "s390x"}


def problems(name: str, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield why krew would refuse a manifest in a file of this name."""
    spec = manifest.get("spec") or {}
    if manifest.get("apiVersion") != "krew.googlecontainertools.github.com/v1alpha2":
        yield "apiVersion"
    if manifest.get("kind") != "Plugin":
        yield "kind"
    if manifest.get("metadata") != {"name": name} or not re.fullmatch(r"[\w-]+", name):
        yield "metadata.name"
    if not _VERSION.fullmatch(spec.get("version", "")):
        yield "spec.version"
    short = spec.get("shortDescription", "")
    if not short or "\n" in short or len(short) > 50:  # longer ones are cut in lists
        yield "spec.shortDescription"
    if spec.keys() - _FIELDS:
        yield f"unknown fields: {spec.keys() - _FIELDS}"
    if not spec.get("platforms"):
        yield "spec.platforms"
    for platform in spec.get("platforms") or ():
        yield from _platform_problems(platform)


def _platform_problems(platform: Mapping[str, Any]) -> Iterator[str]:
    if platform.keys() - _PLATFORM_FIELDS:
        yield f"unknown fields: {platform.keys() - _PLATFORM_FIELDS}"
    if not platform.get("uri", "").startswith("https://"):
        yield "uri"
    if not re.fullmatch(r"[a-f0-9]{64}", platform.get("sha256", "")):
        yield "sha256"
    if not platform.get("bin"):
        yield "bin"
    labels = (platform.get("selector") or {}).get("matchLabels") or {}
    if labels.keys() != {"os", "arch"}:
        yield "selector"
    elif labels["os"] not in _SYSTEMS or labels["arch"] not in _PROCESSORS:
        yield f"selector: {labels}"
