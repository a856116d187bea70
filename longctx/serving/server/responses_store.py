"""Responses that are kept in memory, each a turn of a conversation that later ones continue.

They are bounded in number for each tenant and in bytes for all, and expire. A turn has the items of its own input and
output alone; those of earlier turns are shared, and remain while a later turn needs them.
"""

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from longctx.serving.server.errors import ApiError
from longctx.serving.server.responses_body import History, ResponsesBody

MAX_RESPONSES, MAX_BYTES = 1000, 2**28  # of a tenant, of all tenants
MAX_TURNS = 1000  # of a conversation: as many are read for its next turn
LIFE_SECONDS = 86_400.0
_MOST_LISTED = 100

_read = msgspec.json.Decoder().decode
_write = msgspec.json.Encoder().encode


@dataclass(eq=False)
class _Turn:
    """Items of one turn, and the turns before it. `users`: the stored response, and turns that follow."""

    previous: "_Turn | None"
    input: bytes
    output: bytes
    users: int = 1

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.output)

    @property
    def chain(self) -> "list[_Turn]":
        """This turn after all before it."""
        turns, turn = [self], self.previous
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return turns[::-1]


@dataclass(eq=False)
class _Stored:
    answer: bytes
    turn: _Turn
    session: str
    expires: float


class ResponseStore:
    """Responses of a server, by tenant. Its methods are for the event loop's thread.

    Args:
      max_responses: of a tenant. One more takes the place of the one that was used longest ago.
      max_bytes: of all tenants. Beyond them the tenant with the most bytes loses the one that it used longest ago.
      life: seconds for which a response is kept after its last use.
      clock: returns seconds.
    """

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        life: float = LIFE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses, self._max_bytes, self._life, self._clock = max_responses, max_bytes, life, clock
        # Of each tenant, the one that was used longest ago first.
        self._stored: defaultdict[str, OrderedDict[str, _Stored]] = defaultdict(OrderedDict)
        self._bytes: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tenants."""
        return self._bytes.total()

    @property
    def num_responses(self) -> int:
        """Responses of all tenants."""
        return sum(map(len, tuple(self._stored.values())))  # metrics are written in another thread

    def add(self, tenant: str, body: ResponsesBody, answer: dict[str, Any], session: str) -> None:
        """Keep a response, whose body has the items of its own input."""
        name = answer["id"]
        previous = None
        if body.previous_response_id is not None:
            own = self._stored.get(tenant)
            if own is None or body.previous_response_id not in own:
                return  # it was deleted meanwhile: a conversation without its beginning is none
            previous = own[body.previous_response_id].turn
            previous.users += 1
        items = [item.shown(f"item_{name.removeprefix('resp_')}_{number}") for number, item in enumerate(body.items)]
        turn = _Turn(previous, _write(items), _write(answer["output"]))
        stored = _Stored(_write(answer), turn, session, self._clock() + self._life)
        self._stored[tenant][name] = stored
        self._bytes[tenant] += turn.num_bytes + len(stored.answer)
        self._make_room(tenant)

    def get(self, tenant: str, name: str) -> bytes:
        """Return a tenant's response as JSON; raise ApiError if it has none of this id."""
        return self._find(tenant, name, "response_id").answer

    def delete(self, tenant: str, name: str) -> None:
        """Forget a response; raise ApiError if the tenant has none of this id."""
        self._find(tenant, name, "response_id")
        self._remove(tenant, name)

    def history(self, tenant: str, previous: str | None, referenced: Iterable[str] = ()) -> History:
        """Return what a body of a tenant names: the conversation up to a response, and items of responses.

        Raises:
          ApiError: the tenant has no such response or item.
        """
        items = {name: self._item(tenant, name) for name in referenced}
        if previous is None:
            return History((), None, items)
        stored = self._find(tenant, previous, "previous_response_id")
        chain = stored.turn.chain
        if len(chain) > MAX_TURNS:
            message = f"previous_response_id has {len(chain):,} turns, and may have {MAX_TURNS:,}: send them as input"
            raise ApiError(400, message, "previous_response_id")
        return History(tuple(items for turn in chain for items in (turn.input, turn.output)), stored.session, items)

    def _item(self, tenant: str, name: str) -> bytes:
        """Return an item, in whose id that of its response is the second part."""
        response, own = f"resp_{''.join(name.split('_')[1:2])}", self._stored.get(tenant)
        turn = own[response].turn if own is not None and response in own else None
        for item in [] if turn is None else [*_read(turn.input), *_read(turn.output)]:
            if item["id"] == name:
                return _write(item)
        message = f"input refers to the item {name[:80]!r}, which is of no response that is kept: send the item itself"
        raise ApiError(404, message, "input", "item_not_found")

    def input_items(self, tenant: str, name: str, limit: int, order: str, after: str | None) -> dict[str, Any]:
        """Return a page of the items that a response was made from, those of earlier turns among them."""
        if not 1 <= limit <= _MOST_LISTED:
            raise ApiError(400, f"limit must be 1 to {_MOST_LISTED}, got {limit}", "limit")
        chain = self._find(tenant, name, "response_id").turn.chain
        items = [item for turn in chain[:-1] for part in (turn.input, turn.output) for item in _read(part)]
        items += _read(chain[-1].input)
        if order == "desc":
            items.reverse()
        first = 0
        if after is not None:
            first = next((number for number, item in enumerate(items, 1) if item["id"] == after), -1)
            if first < 0:
                raise ApiError(400, f"after must be the id of an item of this response, got {after[:80]!r}", "after")
        page = items[first : first + limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
        return {"object": "list", "data": page, "has_more": first + limit < len(items), **ends}

    def _find(self, tenant: str, name: str, param: str) -> _Stored:
        self._expire()
        own = self._stored.get(tenant)
        if own is None or name not in own:
            message = f"{param}: there is no response {name[:80]!r}: it was not stored, has expired, or was deleted"
            raise ApiError(404, message, param, "response_not_found")
        own.move_to_end(name)
        own[name].expires = self._clock() + self._life
        return own[name]

    def _expire(self) -> None:
        now = self._clock()
        for tenant in tuple(self._stored):
            for name in tuple(_expired(self._stored[tenant], now)):
                self._remove(tenant, name)

    def _make_room(self, tenant: str) -> None:
        self._expire()
        if len(self._stored[tenant]) > self._max_responses:
            self._remove(tenant, next(iter(self._stored[tenant])))
        while self.num_bytes > self._max_bytes and self._stored:
            largest = max(self._stored, key=self._bytes.__getitem__)
            self._remove(largest, next(iter(self._stored[largest])))

    def _remove(self, tenant: str, name: str) -> None:
        stored = self._stored[tenant].pop(name)
        if not self._stored[tenant]:
            del self._stored[tenant]
        self._bytes[tenant] -= len(stored.answer)
        turn: _Turn | None = stored.turn
        while turn is not None:
            turn.users -= 1
            if turn.users:
                break
            self._bytes[tenant] -= turn.num_bytes
            turn = turn.previous
        if not self._bytes[tenant]:
            del self._bytes[tenant]


def _expired(own: OrderedDict[str, _Stored], now: float) -> Iterator[str]:
    """Yield the responses that have expired: those that were used longest ago come first."""
    for name, stored in own.items():
        if stored.expires > now:
            break
        yield name
