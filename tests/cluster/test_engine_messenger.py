"""Messengers of an engine of several processes: each fetches when the first one says from where, who alone releases."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cluster.fake_engine import LAYOUT, FakeEngine, Taker, make_keys, wait_until

from longctx.cluster.engine_messenger import EngineMessenger
from longctx.cluster.transfer import PageSender, TransferOptions
from longctx.serving.distributed import ProcessGroup
from longctx.serving.kv_cache.page_layout import PageSlice

OPTIONS = TransferOptions(block_bytes=1 << 12, read_bytes=1 << 14, silence_timeout=2.0)


class Group(ProcessGroup):
    """One process of several, of which the others are not there."""

    def gather(self, what: str, value: Any, timeout: float | None = None) -> list[Any]:
        return [value] * self.num_processes


class Pages(SimpleNamespace):
    """What a messenger asks of an engine's pages."""

    def __init__(self) -> None:
        super().__init__(on_fetch=[], located=[])

    def locate(self, lease_id: str, place: dict[str, Any] | None) -> None:
        self.located.append((lease_id, place))


def stand_in(process_id: int, hosts: tuple[str, ...] = ("a", "a")) -> Any:
    """An engine in one process of several."""
    config = SimpleNamespace(transfers=True, prefix_cache=True)
    group = Group(process_id, list(hosts), None, None, None, 1.0)
    identity = LAYOUT, b""
    return SimpleNamespace(
        page_identity=identity, config=config, process_group=group, pages=Pages(), mesh=None, now=lambda: 0.0
    )


def messenger(engine: Any, **options: Any) -> contextlib.closing[EngineMessenger]:
    return contextlib.closing(
        EngineMessenger(engine, options.pop("ip", "127.0.0.1"), 0, None, options=OPTIONS, **options)
    )


@pytest.fixture
def halves() -> Iterator[tuple[list[FakeEngine], list[PageSender]]]:
    """Another engine of two processes, with some layers each."""
    parts = [PageSlice((0, 3), (0, 4)), PageSlice((3, 5), (0, 4))]
    engines = [FakeEngine(parts=[part]) for part in parts]
    with contextlib.ExitStack() as stack:
        yield engines, [stack.enter_context(PageSender(each, LAYOUT, options=OPTIONS)) for each in engines]


def lend(engines: list[FakeEngine]) -> tuple[Any, np.ndarray]:
    lease_id = "0" * 32
    first, _ = (each.add(9, lease_id=lease_id) for each in engines)
    return first


def test_the_first_process_tells_the_others_and_releases_at_the_end(halves: Any) -> None:
    engines, senders = halves
    (lease, pages), addresses, engine = lend(engines), [each.address for each in senders], stand_in(0)
    with messenger(engine) as made:
        assert made.followers == [f"127.0.0.1:{made.port}"]
        source = made.source(addresses, lease.lease_id, deadline=9.0, lease_timeout=0.5)
        assert engine.pages.located == []
        taker = Taker(source, lease.keys, LAYOUT)
        place = {"addresses": addresses, "deadline": 9.0, "lease_timeout": 0.5}
        assert engine.pages.located == [(lease.lease_id, place)]
        assert taker.finish() == 9
        assert np.array_equal(taker.pages, pages)
        [note] = engine.pages.on_fetch
        note(lease.lease_id, False)
        assert engine.pages.located[1:] == [(lease.lease_id, None)]
        assert [each.released for each in engines] == [[], []]  # others may still fetch
        note(lease.lease_id, True)
        wait_until(lambda: [each.released for each in engines] == [[lease.lease_id]] * 2)


def test_another_process_waits_until_it_is_told(halves: Any) -> None:
    engines, senders = halves
    (lease, pages), engine = lend(engines), stand_in(1)
    place = {"addresses": [each.address for each in senders], "deadline": 9.0, "lease_timeout": 0.0}
    with messenger(engine) as made:
        assert engine.pages.on_fetch == []
        made.locate("unknown", place)
        taker = Taker(made.open(lease.lease_id), lease.keys, LAYOUT)
        assert not taker.fetch.is_over
        made.locate(lease.lease_id, place)
        taker.wait_for(9)
        made.locate(lease.lease_id, None)
        assert taker.finish() == 9
        assert np.array_equal(taker.pages, pages)
        made.drop(lease.lease_id)
        made.drop(lease.lease_id)
        assert made.receiver.stats.outcomes["complete"] == 1
    assert [each.released for each in engines] == [[], []]


def test_where_the_first_process_gets_nothing_nor_do_others(halves: Any) -> None:
    """It has asked one that has no such lease, or nobody at all."""
    with messenger(stand_in(1)) as made, PageSender(FakeEngine(), LAYOUT, options=OPTIONS) as empty:
        for lease, place in (
            ("a" * 32, {"addresses": [empty.address], "deadline": 9.0, "lease_timeout": 0.0}),
            ("b" * 32, None),
        ):
            taker = Taker(made.open(lease), make_keys(9), LAYOUT)
            made.locate(lease, place)
            assert taker.finish() == 0
        assert made.receiver.stats.outcomes["refused"] == 1


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="ip must be one by which other hosts reach this process of several, got 127"):
        EngineMessenger(stand_in(0, ("a", "b")), "127.0.0.1", 0, None)
    with messenger(stand_in(1, ("a", "b")), advertised="10.0.0.2") as made:
        assert made.host == "10.0.0.2"
    with pytest.raises(ValueError, match="messenger must be one of zmq, "):
        EngineMessenger(stand_in(0), "127.0.0.1", 0, None, messenger="pigeon")
