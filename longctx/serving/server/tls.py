"""TLS of a server, and of what it asks other servers, from files that may be replaced while it runs."""

import contextlib
import os
import ssl
import time
from pathlib import Path
from typing import Literal, NoReturn

from longctx.serving.kv_cache.secret import check_private

_MOST_BYTES = 2**20  # of a file
_ROUNDS = 4  # of a handshake: two suffice


class Tls:
    """TLS of a server, for its clients and for the servers that it asks.

    Args:
      cert: PEM file of the certificate, and behind it of those between it and its CA's.
      key: PEM file of its private key, without a password, that its owner alone may read.
      ca: PEM file of the CAs that sign the certificates of the other servers of a cluster: clients' certificates are
        verified by them, and those of the servers that are asked. None: clients need no certificate, and the servers
        that are asked have one of a CA that the system knows.

    Attributes:
      server: of connections that come. client: of connections to other servers, which see the same certificate. Each is
        another one after `load`.

    Raises:
      ValueError: see `load`.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext

    def __init__(self, cert: Path, key: Path, ca: Path | None = None) -> None:
        self._cert, self._key, self._ca = cert, key, ca
        self.load()

    @property
    def has_ca(self) -> bool:
        """Whether clients' certificates are verified."""
        return self._ca is not None

    def load(self) -> None:
        """Read the files; connections that are open keep what they have.

        Raises:
          ValueError: a file can't be read or is not what it should be, the key is of another certificate, or a
            certificate has expired. The message names the argument, and nothing changes.
        """
        _read_pem("tls_cert", self._cert, "certificate")
        _read_pem("tls_key", self._key, "private key")
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._use_certificate(server)
        if self._ca is None:
            client = ssl.create_default_context()
        else:
            client = _trusting(self._ca)
            server.load_verify_locations(self._ca)
            server.verify_mode = ssl.CERT_OPTIONAL  # a probe has none
        self._use_certificate(client)
        self._try(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
        self.server, self.client = server, client

    def _use_certificate(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._cert, self._key, self._refuse_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ValueError(f"tls_key: {self._key} is not the key of the certificate in {self._cert}") from None
            raise ValueError(f"tls_cert and tls_key can't be used: {error.reason or error}") from None

    def _refuse_password(self) -> NoReturn:
        raise ValueError(f"tls_key: {self._key} needs a password: give a key without one")

    def _try(self, server: ssl.SSLContext) -> None:
        """Check that others accept the certificate, by a handshake in memory of two sides that trust it alone."""
        client = ssl.create_default_context(cafile=str(self._cert))
        client.check_hostname = False
        for context in (client, server):
            self._use_certificate(context)
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if self._ca is not None:
            server.load_verify_locations(self._cert)
            server.verify_mode = ssl.CERT_REQUIRED
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = client.wrap_bio(incoming, outgoing), server.wrap_bio(outgoing, incoming, server_side=True)
        try:
            for side in sides * _ROUNDS:
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        except ssl.SSLCertVerificationError as error:
            raise ValueError(f"tls_cert: {self._cert} would be refused: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise ValueError(f"tls_cert and tls_key can't be used: {error.reason or error}") from None


def _read_pem(name: str, path: Path, kind: Literal["certificate", "private key"]) -> str:
    try:
        with path.open("rb") as file:
            if kind == "private key":
                check_private(name, path, os.fstat(file.fileno()))
            contents = file.read(_MOST_BYTES).decode("ascii", "replace")
    except OSError as error:
        raise ValueError(f"{name}: {path} can't be read: {error.strerror}") from None
    if f"{kind.upper()}-----" not in contents:
        raise ValueError(f"{name}: {path} has no {kind} in PEM")
    return contents


def _trusting(path: Path) -> ssl.SSLContext:
    """Return the context of a client that trusts the CAs of a file alone."""
    authorities = _read_pem("tls_ca", path, "certificate")
    try:
        context = ssl.create_default_context(cadata=authorities)
    except ssl.SSLError as error:
        raise ValueError(f"tls_ca: {path} can't be used: {error.reason or error}") from None
    ends = [ssl.cert_time_to_seconds(str(each["notAfter"])) for each in context.get_ca_certs()]
    if not ends:
        raise ValueError(f"tls_ca: {path} has no certificate of a CA")
    if max(ends) < time.time():
        raise ValueError(f"tls_ca: {path} has expired certificates alone")
    return context
