"""The commands of the page about verification, in a shell, with the local registry."""

import os
import subprocess

from tests.harness.fences import DOCS, fences, output
from tools.debian import install
from tools.provenance import programs

PAGE = DOCS / "how-to" / "verify-a-release.md"


def run(published, keys, registry, public_key: str) -> subprocess.CompletedProcess:
    install({"jq": "jq"})
    commands = [fence.text for fence in fences(PAGE, "sh") if fence.reason.startswith("tests/release runs")]
    assert len(commands) == 4
    script = "\n".join(commands).replace("ghcr.io/YOU", registry).replace("cosign.pub", public_key)
    folders = [str(programs.path(name).parent) for name in ("cosign", "crane")]
    environment = {**os.environ, "PATH": os.pathsep.join([*folders, os.environ["PATH"]])}
    argv = ["bash", "-euo", "pipefail", "-c", script]
    return subprocess.run(argv, cwd=keys, env=environment, capture_output=True, text=True)


def test_commands_verify_and_print(published, keys, registry):
    done = run(published, keys, registry, "cosign.pub")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("The signatures were verified against the specified public key") >= 4
    for command in ("cosign verify --key", "--type slsaprovenance1", "sidecar.cdx.json"):
        for line in output("how-to/verify-a-release.md", command).splitlines():
            assert line.strip("…").partition("@")[0] in done.stdout
    assert '"sourceDateEpoch"' in done.stdout
    assert "pkg:pypi/grpcio@" in done.stdout


def test_commands_stop_with_the_wrong_key(published, keys, registry):
    done = run(published, keys, registry, "other.pub")
    assert done.returncode == 1
    assert "sourceDateEpoch" not in done.stdout
