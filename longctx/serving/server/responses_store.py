"""`ResponseStore`: responses that are kept, for clients that ask for them and go on after them."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from longctx.serving.server.chat_schemas import Message
from longctx.serving.server.errors import ApiError

_SECONDS = 3600.0  # for which a response is kept since it was last used
_MOST_BYTES = 256 * 2**20  # of all responses
_SHARE = 4  # of all bytes a tenant has this part, at most


class History(NamedTuple):
    """Conversation up to a response: its messages, and the id of its first response."""

    messages: list[Message]
    root: str


class Stored(NamedTuple):
    """A response that is kept.

    Attributes:
      history: with its own answer.
      items: of its input, as its client sent them.
    """

    tenant: str
    response: dict[str, Any]
    history: History
    items: list[dict[str, Any]]
    size: int
    used: float


class ResponseStore:
    """Responses of all tenants, in memory, the last used ones. For the event loop.

    Args:
      clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._sizes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, tenant: str, response: dict[str, Any], history: History, items: list[dict[str, Any]]) -> None:
        """Keep a response; those that were not used for longest make room."""
        size = len(msgspec.json.encode([response, items])) + sum(message.size for message in history.messages)
        if size > _MOST_BYTES // _SHARE:
            return
        self._drop_old()
        while self._sizes.get(tenant, 0) + size > _MOST_BYTES // _SHARE:
            self._drop(next(name for name, each in self._kept.items() if each.tenant == tenant))
        while self.num_bytes + size > _MOST_BYTES:
            self._drop(next(iter(self._kept)))
        self._kept[response["id"]] = Stored(tenant, response, history, items, size, self._clock())
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size

    def get(self, tenant: str, name: str, param: str | None = None) -> Stored:
        """Return a tenant's response; ApiError: there is none of this id, any more."""
        self._drop_old()
        found = self._kept.get(name)
        if found is None or found.tenant != tenant:
            raise ApiError(404, f"there is no response {name[:80]!r}, or no longer", param, "response_not_found")
        self._kept.move_to_end(name)
        self._kept[name] = found = found._replace(used=self._clock())
        return found

    def delete(self, tenant: str, name: str) -> None:
        """Forget a tenant's response; ApiError as from `get`."""
        self.get(tenant, name)
        self._drop(name)

    def _drop_old(self) -> None:
        limit = self._clock() - _SECONDS
        while self._kept and next(iter(self._kept.values())).used < limit:
            self._drop(next(iter(self._kept)))

    def _drop(self, name: str) -> None:
        gone = self._kept.pop(name)
        self._sizes[gone.tenant] -= gone.size
        if not self._sizes[gone.tenant]:
            del self._sizes[gone.tenant]
