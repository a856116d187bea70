"""A store beyond this machine as a tier: what it has, loses, corrupts, or is slow to say."""

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from tier_pages import LAYOUT, chain, load, make_store, only_on_disk, put, wait_for

from longctx.serving.kv_cache.tiers.remote import CHECKSUM_BYTES, RemoteProbe, open_remote

PAGE = LAYOUT.page_bytes
KEYS = chain("a", 6)


class FakeRemote:
    """Values in a dictionary, which stores of several machines share."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.capacity = 1000

    def exists(self, names: Sequence[bytes]) -> int:
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return next((i for i, name in enumerate(names) if name not in self.values), len(names))

    def get(self, names: Sequence[bytes], out: np.ndarray) -> int:
        count = self.exists(names)
        for row, name in zip(out, names[:count], strict=False):
            row[:] = np.frombuffer(self.values[name], np.uint8)
        return count

    def put(self, name: bytes, value: bytes) -> bool:
        if self.error is not None:
            raise self.error
        if len(self.values) >= self.capacity:
            return False
        self.values[name] = value
        return True


def test_what_one_machine_stores_another_finds() -> None:
    remote = FakeRemote()
    one, other = make_store(remote=remote), make_store(remote=remote)
    put(one, KEYS)
    assert one.stats.remote.stored == 6
    assert {len(value) for value in remote.values.values()} == {CHECKSUM_BYTES + PAGE}
    assert other.count(KEYS) == 0
    assert load(other, KEYS) == 6
    assert (other.stats.remote.hits, other.tier_of(KEYS[0])) == (6, "host")
    assert load(other, [*KEYS, b"other"]) == 6
    for store in (one, other):
        store.close()
    # Another model's pages are others.
    stranger = make_store(remote=remote, fingerprint=b"another model")
    assert load(stranger, KEYS) == 0
    stranger.close()


def test_a_look_up_finds_remote_pages_and_fetches_them_ahead() -> None:
    remote = FakeRemote()
    one, other = make_store(remote=remote, pages=32), make_store(remote=remote, pages=32)
    put(one, KEYS)
    put(other, KEYS[:2])
    assert other.look_up([*KEYS, b"other"]) == 2  # nobody waits for what the remote store says
    asked = other.ask_ahead([*KEYS, b"other"])
    assert asked is None or asked.result(10) is None
    wait_for(lambda: other.look_up([*KEYS, b"other"]) == 6)
    wait_for(lambda: other.count(KEYS) == 6)
    remote.values.clear()
    assert load(other, KEYS) == 6
    for store in (one, other):
        store.close()


def test_a_store_that_hangs_costs_an_engine_nothing() -> None:
    remote = FakeRemote()
    one, other = make_store(remote=remote), make_store(remote=remote)
    put(one, KEYS)
    put(other, KEYS[:2])
    remote.gate.clear()
    threads = threading.active_count()
    assert [other.look_up(KEYS) for _ in range(100)] == [2] * 100
    assert [other.ask_ahead(KEYS) for _ in range(10)][-1] is None  # it has not answered for long
    assert threading.active_count() == threads
    assert load(other, KEYS[:1]) == 1
    woken = threading.Event()
    fetch = other.fetch(KEYS, woken.set)  # it hangs: whoever waits gives it up in time
    wait_for(lambda: fetch.num_come == 2)
    assert not fetch.is_over
    fetch.close()
    remote.gate.set()
    wait_for(lambda: not other.num_loads)
    wait_for(lambda: other.look_up(KEYS) == 6)
    for store in (one, other):
        store.close()


@pytest.mark.parametrize("place", [0, CHECKSUM_BYTES, CHECKSUM_BYTES + PAGE - 1])
def test_wrong_bits_in_a_remote_store_are_a_miss(place: int) -> None:
    remote = FakeRemote()
    one, other = make_store(remote=remote), make_store(remote=remote)
    put(one, KEYS)
    name = list(remote.values)[3]
    value = bytearray(remote.values[name])
    value[place] ^= 8
    remote.values[name] = bytes(value)
    assert load(other, KEYS) == 3
    assert (other.stats.remote.corrupt, other.stats.remote.misses) == (1, 3)
    # A page under another's name is wrong too.
    names = list(remote.values)
    remote.values[names[0]], remote.values[names[1]] = remote.values[names[1]], remote.values[names[0]]
    other.evict(lambda key: True)
    assert load(other, KEYS) == 0
    for store in (one, other):
        store.close()


def test_errors_and_a_full_store_cost_hits_only(caplog: pytest.LogCaptureFixture) -> None:
    remote = FakeRemote()
    remote.capacity = 4
    store = make_store(remote=remote)
    put(store, KEYS)
    assert (store.stats.remote.stored, store.stats.remote.dropped) == (4, 2)
    remote.error = ConnectionError("the link is cut")
    put(store, chain("b", 2))
    assert store.stats.remote.failed == 2
    assert caplog.text.count("link is cut") == 1
    assert load(store, chain("b", 2)) == 2
    only_on_disk(store)
    assert store.look_up(KEYS) == 0
    fetch = store.fetch(KEYS, lambda: None)
    wait_for(lambda: fetch.is_over)
    assert fetch.num_pages == 0
    fetch.close()
    remote.error = None
    assert load(store, KEYS) == 4
    store.close()
    wait_for(lambda: not any(thread.name.startswith("kv-probe") for thread in threading.enumerate()))


def test_urls_of_stores() -> None:
    for url in ("redis://here", "mooncake", "mooncake://", "", "://x"):
        with pytest.raises(ValueError, match=f"store must be one of mooncake://HOST:PORT, got '{url}'"):
            open_remote(url)


def test_what_is_known_is_bounded_and_grows_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longctx.serving.kv_cache.tiers.remote._MOST_KNOWN", 4)
    fake = FakeRemote()
    names = [b"%d" % i for i in range(6)]
    fake.values = dict.fromkeys(names, b"")
    probe = RemoteProbe(fake)
    for name in names:
        asked = probe.ask([name])
        assert asked is not None
        asked.result(10)
    fake.gate.clear()  # it says nothing new
    assert [probe.exists([name]) for name in names] == [0, 0, 1, 1, 1, 1]
    fake.error = ConnectionError("the link is cut")
    monkeypatch.setattr("time.monotonic", lambda now=time.monotonic: now() + 11)
    assert probe.exists(names[2:]) == 0
    fake.gate.set()
    monkeypatch.undo()
    probe.close()
