"""Certificates of tests, made by the `openssl` command."""

import subprocess
from pathlib import Path
from typing import NamedTuple

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Certificate(NamedTuple):
    """Files of a certificate and its key."""

    cert: Path
    key: Path


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def make_ca(folder: Path, name: str = "ca") -> Certificate:
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    usage = ["-addext", "keyUsage=critical,keyCertSign"]  # which Python 3.13 asks for
    _openssl(
        "req", "-x509", *_KEY, "-subj", f"/CN={name}", *usage, "-days", "2", "-keyout", made.key, "-out", made.cert
    )
    return made


def make_certificate(folder: Path, ca: Certificate, name: str, days: int = 2) -> Certificate:
    """Make a certificate of this host's loopback addresses; with -1 days it has expired."""
    made, request = Certificate(folder / f"{name}.pem", folder / f"{name}.key"), folder / f"{name}.csr"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    _openssl("req", "-new", *_KEY, "-subj", f"/CN={name}", "-addext", names, "-keyout", made.key, "-out", request)
    signs = ["-CA", ca.cert, "-CAkey", ca.key, "-CAcreateserial", "-copy_extensions", "copyall"]
    _openssl("x509", "-req", "-in", request, *signs, "-days", str(days), "-out", made.cert)
    made.key.chmod(0o600)
    return made
