"""Registration of a server with the routers of a cluster: `Joining`, its end, and `Challenges`, a router's.

Both ends prove to each other that they know the secret of page keys, by signatures over a random text of each, before
either sends a key: the server that of the router's administrator with its registration, and the router that of the
instance's with its first questions. The server's signature is over its URL too, so that no other URL comes with it.
"""

import logging
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from longctx.cluster.conductor.config import Role
from longctx.cluster.server_url import check_server_url, split_server_url
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.server.tls import Tls

logger = logging.getLogger(__name__)

_EVERY = 5.0  # seconds between two registrations: a router that has come back learns of the instance by them
_TIMEOUT = 5.0
_PROOF_SECONDS = 30.0  # within which a server registers after its challenge


class Challenges:
    """Router's end of registrations: what servers have to sign, and whether they have.

    Args:
      page_hash: of the cluster.
    """

    def __init__(self, page_hash: PageHash) -> None:
        self._hash, self._own = page_hash, PageHash(secrets.token_bytes(32), 1)

    def make(self, nonce: str) -> dict[str, str]:
        """Make a challenge for a server that has drawn `nonce`, with the router's own proof; nothing is kept of it."""
        challenge = f"{time.monotonic() + _PROOF_SECONDS:.3f} {secrets.token_hex(16)}"
        challenge += f" {self._own.sign(nonce, challenge)}"
        return {"challenge": challenge, "proof": self._hash.sign("router", nonce, challenge)}

    def is_proven(self, nonce: str, challenge: str, proof: str, *said: str | None) -> bool:
        """Return whether a server that knows the secret has signed a challenge, and what it said, in time."""
        drawn, _, own = challenge.rpartition(" ")
        return (
            self._own.is_signed(own, nonce, drawn)
            and time.monotonic() < float(drawn.partition(" ")[0])
            and self._hash.is_signed(proof, "instance", nonce, challenge, *said)
        )


class Joining:
    """Context manager that registers an instance while it takes requests, and removes it at the end.

    Args:
      routers: addresses, `HOST:PORT` or `http://HOST:PORT`; each is told by itself.
      url: by which the routers reach this server.
      role: its first one; a router may change it.
      is_open: whether the server takes requests now.
      page_hash: of the cluster.
      key: of an administrator of the routers; None: they need none.
      name: of the instance; None: its host and port.
      tls: of the server. Routers without a scheme in their addresses are `https://` then.
      seconds: between two registrations.

    Raises:
      ValueError: an address is none.
    """

    def __init__(
        self,
        routers: Sequence[str],
        url: str,
        role: Role,
        is_open: Callable[[], bool],
        page_hash: PageHash,
        key: str | None = None,
        name: str | None = None,
        tls: Tls | None = None,
        seconds: float = _EVERY,
    ) -> None:
        self._routers = [router_url(each, "http" if tls is None else "https") for each in routers]
        self._body = {"url": check_join_url(url), "name": name, "role": role}
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._is_open, self._hash, self._tls, self._seconds = is_open, page_hash, tls, seconds
        self._system = ssl.create_default_context()  # without `tls`
        self._said: dict[str, str] = {}  # the last logged state of each router
        self._is_closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name="longctx join", daemon=True) for each in self._routers
        ]

    def __enter__(self) -> "Joining":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closing.set()
        for each in self._threads:
            each.join(2 * _TIMEOUT)

    def _run(self, router: str) -> None:
        is_known = False
        while not self._is_closing.is_set():
            if self._is_open():
                with self._client() as client:
                    is_known = self._tell(client, router, "register", self._body) or is_known
            self._is_closing.wait(self._seconds if is_known else min(1.0, self._seconds))
        if is_known:
            with self._client() as client:
                self._tell(client, router, "remove", {"url": self._body["url"]})

    def _client(self) -> httpx.Client:
        """Make a client with the certificates of the time."""
        verify = self._system if self._tls is None else self._tls.client
        return httpx.Client(trust_env=False, timeout=_TIMEOUT, verify=verify)

    def _tell(self, client: httpx.Client, router: str, what: str, body: dict[str, Any]) -> bool:
        """Post a body to a router that proves that it knows the secret; return whether it has accepted it."""
        is_known, level = False, logging.WARNING
        try:
            proof = self._prove(client, router)
            answer = client.post(f"{router}/cluster/{what}", json=body | proof, headers=self._headers)
            is_known, said = answer.status_code == 200, f"{answer.status_code} {_reason(answer)}"
        except httpx.HTTPError as error:
            level, said = logging.INFO, f"no answer: {type(error).__name__}"
        except ValueError as error:
            said = str(error)
        if is_known:
            level, said = logging.INFO, "it is known there"
        if self._said.get(router) != said:
            self._said[router] = said
            logger.log(level, "longctx: router %s: %s: %s", router, what, said)
        return is_known

    def _prove(self, client: httpx.Client, router: str) -> dict[str, str]:
        """Return the proof that goes along with a registration. ValueError: the router has none itself."""
        nonce = secrets.token_hex(16)
        answer = client.post(f"{router}/cluster/challenge", json={"nonce": nonce})
        try:
            found = answer.json()
            challenge, proof = str(found["challenge"]), str(found["proof"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{answer.status_code} {_reason(answer)}") from None
        if not self._hash.is_signed(proof, "router", nonce, challenge):
            raise ValueError("it does not know the secret of page keys (--kv-secret-file), so it gets no key")
        own = self._body["url"], self._body["name"], self._body["role"]
        return {"nonce": nonce, "challenge": challenge, "proof": self._hash.sign("instance", nonce, challenge, *own)}


def router_url(text: str, scheme: str = "http") -> str:
    """Return the URL of a router, from `HOST:PORT` or a URL; ValueError: it is none."""
    url = text if "://" in text else f"{scheme}://{text}"
    parts = split_server_url(url)
    if parts is None or parts.port is None:
        raise ValueError(f"join must be HOST:PORT, got {text!r}")
    return url.rstrip("/")


def check_join_url(url: str) -> str:
    """Return the URL by which a router reaches this server; ValueError: it can't be reached there."""
    parts = split_server_url(check_server_url("join_url", url))
    if parts is None or parts.port is None or parts.hostname in ("0.0.0.0", "::"):
        raise ValueError(f"join_url must be where the router reaches this server, http://HOST:PORT, got {url!r}")
    return url.rstrip("/")


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
