"""The SLSA provenance of an artifact: from which commit, base image and lock files it was built, and by whom.

The format is the predicate of https://slsa.dev/spec/v1.0/provenance. It has no time, so that two builds of
one commit by one builder have equal statements.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/lmcache-cluster/lmcache-cluster"
"""Address of the source if the builder does not name one."""
BUILD_TYPE = f"{REPOSITORY}/blob/main/docs/how-to/verify-a-release.md#read-the-provenance"
LOCAL_BUILDER = f"{REPOSITORY}/blob/main/tools/release.py"
"""Name of a builder outside of GitHub Actions."""


class SourceError(RuntimeError):
    """The checkout is no commit that a statement could name."""


@dataclass(frozen=True)
class Source:
    """The commit from which a release is built."""

    url: str
    commit: str
    epoch: int
    """Time of the commit in seconds. Files in the images have this time."""


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SourceError(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def source(environment: Mapping[str, str] = os.environ) -> Source:
    """Return the commit of this checkout. Raises `SourceError` outside of a Git repository."""
    server, repository = environment.get("GITHUB_SERVER_URL"), environment.get("GITHUB_REPOSITORY")
    url = f"{server}/{repository}" if server and repository else REPOSITORY
    return Source(url, git("rev-parse", "HEAD"), int(git("log", "-1", "--format=%ct")))


def check_clean() -> None:
    """Raises `SourceError` if files differ from the commit: a statement would name the wrong source."""
    if changed := git("status", "--porcelain"):
        first = changed.splitlines()[0]
        raise SourceError(f"the checkout has changes that are not committed, first {first!r}: commit them")


def provenance(
    name: str,
    version: str,
    built_from: Source,
    files: Sequence[Path],
    base: tuple[str, str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Return the predicate as JSON.

    Args:
        name: name of the artifact, such as ``sidecar``.
        version: version of the release.
        built_from: the commit.
        files: files of the checkout that define the artifact's content, such as its lock file.
        base: name and digest of the base image.
        environment: variables of GitHub Actions, which name the builder.
    """
    git_url = f"git+{built_from.url}@{built_from.commit}"
    dependencies = [{"uri": git_url, "digest": {"gitCommit": built_from.commit}}]
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        dependencies.append({"uri": f"{git_url}#{path.relative_to(ROOT)}", "digest": {"sha256": digest}})
    if base:
        reference, digest = base
        dependencies.append(
            {"uri": f"docker://{reference}", "digest": {"sha256": digest.removeprefix("sha256:")}}
        )
    predicate = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {"artifact": name, "version": version, "source": git_url},
            "internalParameters": {"sourceDateEpoch": built_from.epoch},
            "resolvedDependencies": dependencies,
        },
        "runDetails": _run_details(environment),
    }
    return json.dumps(predicate, indent=1) + "\n"


def _run_details(environment: Mapping[str, str]) -> dict[str, object]:
    server, workflow = environment.get("GITHUB_SERVER_URL"), environment.get("GITHUB_WORKFLOW_REF")
    if not server or not workflow:
        return {"builder": {"id": LOCAL_BUILDER}}
    run = f"{server}/{environment['GITHUB_REPOSITORY']}/actions/runs/{environment['GITHUB_RUN_ID']}"
    attempt = environment.get("GITHUB_RUN_ATTEMPT", "1")
    return {
        "builder": {"id": f"{server}/{workflow}"},
        "metadata": {"invocationId": f"{run}/attempts/{attempt}"},
    }
