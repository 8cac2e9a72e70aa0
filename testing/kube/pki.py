"""Certificates and tokens of a throw-away control plane."""

from __future__ import annotations

import secrets
import subprocess
from pathlib import Path

SERVER_NAMES = "IP:127.0.0.1,IP:10.96.0.1,DNS:kubernetes.default.svc"
CONTROLLER_MANAGER, SCHEDULER = "system:kube-controller-manager", "system:kube-scheduler"
USERS = {
    "admin": "system:masters",
    "kwok": "system:masters",
    CONTROLLER_MANAGER: "",  # bootstrap ClusterRoles are bound to these user names
    SCHEDULER: "",
}
"""User name → group."""

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make(directory: Path) -> dict[str, str]:
    """Write ca.*, api.*, sa.* and tokens.csv into ``directory``. Returns each user's token."""

    def openssl(*argv: str) -> None:
        subprocess.run(["openssl", *argv], cwd=directory, check=True, capture_output=True)

    directory.mkdir(parents=True, mode=0o700)
    (directory / "names").write_text(f"subjectAltName={SERVER_NAMES}")
    openssl(
        "req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-out", "ca.crt", "-days", "30",
        "-subj", "/CN=local-ca", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
    )  # fmt: skip
    openssl("req", *_NEW_KEY, "-keyout", "api.key", "-out", "api.csr", "-subj", "/CN=kube-apiserver")
    openssl(
        "x509", "-req", "-in", "api.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
        "-out", "api.crt", "-days", "30", "-extfile", "names",
    )  # fmt: skip
    openssl("ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", "sa.key")
    openssl("ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")
    tokens = {user: secrets.token_hex(16) for user in USERS}
    rows = [f'{tokens[user]},{user},{user},"{group}"' for user, group in USERS.items()]
    (directory / "tokens.csv").write_text("\n".join(rows) + "\n")
    return tokens
