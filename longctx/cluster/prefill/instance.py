"""`PrefillInstance`: a server that computes prompts for this one."""

import time
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from longctx.cluster.server_url import host_port

_CONNECT_SECONDS = 2.0
_KNOWN_SECONDS = 5.0  # for which it is believed where the pages are of a server that is not watched
_MOST_MISSED = 3  # looks in a row that it may be too busy to answer
_LONGEST_PAUSE = 30.0  # seconds for which a server is left out that fails again and again, or says that it is full

Answer = Literal["done", "refused", "failed"]
"""How a prompt that was sent to it ended: computed; refused for lack of room; or failed, as if not reached."""


class PrefillInstance:
    """A server that computes prompts. Its coroutines run in one event loop; all else may be called from any thread.

    Args:
      url: of its HTTP, such as `http://host:8000`.
      key: that it takes for `/server_info` and `/load`; None: it needs none.
      is_watched: `look` is called again and again. Else it is asked where its pages are when a prompt goes there.

    Attributes:
      addresses: `host:port` where its pages are fetched, of each of its processes; None: it has not been reached yet.

    Raises:
      ValueError: the URL is none.
    """

    def __init__(self, url: str, key: str | None = None, is_watched: bool = True) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"url must be http://HOST:PORT, got {url!r}")
        self.url, self.is_watched = url.rstrip("/"), is_watched
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.addresses: list[str] | None = None
        self._backlog, self._heard = 0.0, 0.0
        self._sent: dict[str, tuple[float, float]] = {}  # prompts that are being read: when they were sent, and seconds
        self._num_failures, self._until = 0, 0.0
        self._num_missed, self._found = 0, 0.0

    @property
    def is_open(self) -> bool:
        """Whether prompts may be sent to it now."""
        return self.addresses is not None and time.monotonic() >= self._until

    @property
    def wait(self) -> float:
        """Predicted seconds until it has computed all prompts: by its last answer, and what was sent to it since."""
        sent = sum(seconds for at, seconds in tuple(self._sent.values()) if at >= self._heard)
        return sent + max(0.0, self._backlog - (time.monotonic() - self._heard))

    def begin(self, name: str, seconds: float) -> None:
        """Note that a prompt is about to be sent, and its predicted seconds."""
        self._sent[name] = time.monotonic(), seconds

    def end(self, name: str) -> None:
        """Note that a prompt has been computed, or is not needed any more."""
        self._sent.pop(name, None)

    async def find(self, client: httpx.AsyncClient, headers: Mapping[str, str]) -> bool:
        """Return whether it is known where its pages are; `headers`: of the request that it shall compute."""
        if self.is_watched or (self.addresses is not None and time.monotonic() - self._found <= _KNOWN_SECONDS):
            return self.addresses is not None
        self.addresses = None  # another one may listen there by now
        known = {name: value for name, value in headers.items() if name == "authorization"}
        try:
            self.addresses = await self._ask_addresses(client, known)
        except (httpx.HTTPError, KeyError, TypeError, ValueError):
            return False
        self._found = time.monotonic()
        return True

    async def look(self, client: httpx.AsyncClient) -> None:
        """Ask where its pages are and how busy it is. One that doesn't answer is left out."""
        try:
            if self.addresses is None:
                self.addresses = await self._ask_addresses(client, self._headers)
            asked = time.monotonic()
            load = await client.get(f"{self.url}/load", headers=self._headers, timeout=_CONNECT_SECONDS)
            if load.status_code == 200:
                self._backlog, self._heard = float(load.json()["backlog_seconds"]), asked
            self._num_missed = 0
        except httpx.TimeoutException:
            self._num_missed += 1
            if self._num_missed >= _MOST_MISSED:
                self.addresses = None
        except (httpx.HTTPError, KeyError, TypeError, ValueError):
            self.addresses = None  # another one may listen there when it is back

    async def _ask_addresses(self, client: httpx.AsyncClient, headers: Mapping[str, str]) -> list[str]:
        found = await client.get(f"{self.url}/server_info", headers=headers, timeout=_CONNECT_SECONDS)
        transfer: dict[str, Any] = found.raise_for_status().json()["kv_transfer"]
        host, port = str(transfer["host"]), int(transfer["port"])
        return [host_port(host, port), *map(str, transfer.get("followers", ()))]

    async def read(self, client: httpx.AsyncClient, body: bytes, headers: Mapping[str, str], seconds: float) -> Answer:
        """Have it compute a prompt, within `seconds`."""
        timeout = httpx.Timeout(seconds, connect=_CONNECT_SECONDS)
        sent = {"content-type": "application/json", **headers}
        try:
            answer = await client.post(f"{self.url}/v1/completions", content=body, headers=sent, timeout=timeout)
        except httpx.HTTPError:
            self._pause(2.0**self._num_failures)
            self._num_failures += 1
            return "failed"
        if answer.status_code == 200:
            self._num_failures = 0
            return "done"
        if answer.status_code in (429, 503):
            self._pause(_seconds(answer.headers.get("retry-after-ms")) / 1000)
            return "refused"
        if answer.status_code >= 500:
            self._pause(2.0**self._num_failures)
            self._num_failures += 1
        return "failed"

    def _pause(self, seconds: float) -> None:
        self._until = time.monotonic() + min(seconds, _LONGEST_PAUSE)


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or "1000"))
    except ValueError:
        return 1000.0
