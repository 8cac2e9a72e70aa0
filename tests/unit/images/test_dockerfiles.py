"""Rules for the Dockerfiles of the released images, in addition to those of hadolint in ``make check``."""

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest

from lmcache_sidecar.config import read

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILES = [ROOT / name / "Dockerfile" for name in ("operator", "sidecar", "router")]
TEST_DOCKERFILES = sorted((ROOT / "tools" / "images").glob("*/Dockerfile"))
PINNED = re.compile(r"scratch|debian:[a-z]+-slim(@sha256:[0-9a-f]{64})?$")
"""Base images of a stable suite, whose packages change only for fixes. A release uses the newest packages."""
SECRET = re.compile(r"(?i)(password|token|secret|api_?key)\s*=")


def instructions(text: str) -> list[tuple[str, str]]:
    """Instructions with arguments, with joined continuation lines and without comments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    parts = (line.partition(" ") for line in joined)
    return [(name.upper(), argument.strip()) for name, _, argument in parts]


def ignored(path: str) -> bool:
    """Whether the build context excludes ``path``. The last matching pattern decides."""
    is_ignored = False
    for pattern in (ROOT / ".dockerignore").read_text().split("\n"):
        negated, bare_pattern = pattern.startswith("!"), pattern.lstrip("!")
        is_pattern = pattern and not pattern.startswith("#")
        if is_pattern and (fnmatch(path, bare_pattern) or fnmatch(path + "/x", bare_pattern)):
            is_ignored = not negated
    return is_ignored


def problems(text: str) -> list[str]:
    """Rule violations of a Dockerfile, as text lines."""
    violations, stages, steps = [], set(), instructions(text)
    for name, argument in steps:
        words = shlex.split(argument)
        if name == "FROM":
            if words[0] not in stages and not PINNED.match(words[0]):
                violations.append(f"FROM {words[0]} is not pinned to a suite")
            stages |= {words[2]} if len(words) == 3 else set()
        elif name == "ADD":
            violations.append(f"ADD {argument}: use COPY")
        elif name == "COPY" and words[0].startswith("--from="):
            if words[0].removeprefix("--from=") not in stages:
                violations.append(f"COPY {words[0]}: no such stage")
        elif name == "COPY":
            for source in words[:-1]:
                if not (ROOT / source).exists():
                    violations.append(f"COPY {source}: not in the checkout")
                elif ignored(source):
                    violations.append(f"COPY {source}: .dockerignore leaves it out")
        elif name == "RUN":
            for install in re.findall(r"(?:uv )?pip install [^&]*", argument):
                if not re.search("--(require-hashes|build-constraint) ", install):
                    violations.append(f"RUN {install}: whatever the index has is installed")
            if re.search(r"\b(sudo|curl|wget)\b", argument):
                violations.append(f"RUN {argument}: fetches by hand or changes user")
        elif name in ("ENV", "ARG") and SECRET.search(argument):
            violations.append(f"{name} {argument}: a secret in a layer")
    last = steps[max(i for i, (name, _) in enumerate(steps) if name == "FROM") :]
    users = [argument for name, argument in last if name == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        violations.append("the image must end as a numeric user that is not root")
    if not any(name == "LABEL" and "org.opencontainers.image.title" in argument for name, argument in last):
        violations.append("no OCI labels")
    return violations


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_dockerfile_obeys_the_rules(path):
    assert problems(path.read_text()) == []


def test_sidecar_image_sets_stay_up():
    text = (ROOT / "sidecar" / "Dockerfile").read_text()
    words = [word for name, argument in instructions(text) if name == "ENV" for word in shlex.split(argument)]
    assert read({}, dict(word.split("=", 1) for word in words)).config.stay_up


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("FROM debian:bookworm-slim AS base\n", "FROM debian:latest AS base\n"), "not pinned"),
        (("USER 65532:65532", "USER root"), "not root"),
        (("USER 65532:65532", ""), "not root"),
        (("COPY sidecar sidecar", "ADD https://example.com/x /x"), "use COPY"),
        (("COPY sidecar sidecar", "COPY missing x"), "not in the checkout"),
        (("COPY sidecar sidecar", "COPY tests tests"), ".dockerignore"),
        (("--from=project", "--from=projct"), "no such stage"),
        (("--no-deps --require-hashes", "--no-deps"), "whatever the index has"),
        (("--build-constraint tools/requirements/build.txt", ""), "whatever the index has"),
        (("CMD", "ENV API_KEY=1\nCMD"), "secret"),
    ],
)
def test_rule_violation_is_found(change, problem):
    text = DOCKERFILES[0].read_text()
    assert change[0] in text
    assert any(problem in line for line in problems(text.replace(*change)))


def test_images_share_their_base_layers():
    """Equal instructions give a shared layer."""
    for first_step in ("debian:bookworm-slim AS base", "base AS root"):
        bases = []
        for path in DOCKERFILES:
            steps = instructions(path.read_text())
            bases.append(steps[(start := steps.index(("FROM", first_step))) : start + 2])
        assert bases[0] == bases[1] == bases[2]
