"""`Joining`: the registration of a server with the routers of a cluster, repeated when they come back."""

import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from longctx.cluster.conductor.config import Role
from longctx.cluster.server_url import check_server_url, split_server_url
from longctx.serving.server.tls import Tls

logger = logging.getLogger(__name__)

_EVERY = 5.0  # seconds between two registrations: a router that has come back learns of the instance by them
_TIMEOUT = 5.0


class Joining:
    """Context manager that registers an instance while it takes requests, and removes it at the end.

    Args:
      routers: addresses, `HOST:PORT` or `http://HOST:PORT`; each is told by itself.
      url: by which the routers reach this server.
      role: its first one; a router may change it.
      is_open: whether the server takes requests now.
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
        key: str | None = None,
        name: str | None = None,
        tls: Tls | None = None,
        seconds: float = _EVERY,
    ) -> None:
        self._routers = [router_url(each, "http" if tls is None else "https") for each in routers]
        self._body = {"url": check_join_url(url), "name": name, "role": role}
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._is_open, self._tls, self._seconds = is_open, tls, seconds
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
        return httpx.Client(trust_env=False, timeout=_TIMEOUT, headers=self._headers, verify=verify)

    def _tell(self, client: httpx.Client, router: str, what: str, body: dict[str, Any]) -> bool:
        """Post a body to a router; return whether it has accepted it."""
        try:
            answer = client.post(f"{router}/cluster/{what}", json=body)
            said = "it is known there" if answer.status_code == 200 else f"{answer.status_code} {_reason(answer)}"
        except httpx.HTTPError as error:
            answer, said = None, f"no answer: {type(error).__name__}"
        if self._said.get(router) != said:
            self._said[router] = said
            is_wrong = answer is not None and answer.status_code != 200
            logger.log(logging.WARNING if is_wrong else logging.INFO, "longctx: router %s: %s: %s", router, what, said)
        return answer is not None and answer.status_code == 200


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
