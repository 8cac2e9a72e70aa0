"""Test certificates, made by openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority, and a certificate that it signed."""

    ca: Path
    cert: Path
    key: Path


def make_certificates(folder: Path, names: str = "IP:127.0.0.1,DNS:localhost") -> Certificates:
    """``names`` are the subjectAltName of the certificate."""
    ca, ca_key, cert, key = (folder / name for name in ("ca.pem", "ca.key", "cert.pem", "key.pem"))
    _openssl("-keyout", ca_key, "-out", ca, "-subj", "/CN=test authority")
    signed = ("-CA", ca, "-CAkey", ca_key, "-addext", f"subjectAltName={names}")
    _openssl("-keyout", key, "-out", cert, "-subj", "/CN=test", *signed)
    return Certificates(ca, cert, key)


def _openssl(*arguments: str | Path) -> None:
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    subprocess.run(["openssl", "req", "-x509", *kind, *arguments], check=True, capture_output=True)
