"""Mooncake's distributed store, with its own master: what one engine stores another one finds."""

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from serve_process import free_port
from serving.tiers.tier_pages import LAYOUT, chain, load, make_store, put

from longctx.cluster.transfer.mooncake import MooncakeStore, open_store
from longctx.serving.kv_cache.tiers.remote import open_remote

OPTIONS = "?segment_bytes=16777216&buffer_bytes=16777216"


def libraries() -> None:
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """The URL of a store whose master runs."""
    libraries()
    program = shutil.which("mooncake_master", path=str(Path(sys.executable).parent))
    assert program is not None
    port = free_port()
    command = [program, "-rpc_address", "127.0.0.1", "-rpc_port", str(port), "-metrics_port", str(free_port())]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None
            assert time.monotonic() < end, "the master does not listen"
            time.sleep(0.05)
        yield f"mooncake://127.0.0.1:{port}{OPTIONS}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


@pytest.fixture(scope="module")
def stores(master: str) -> tuple[MooncakeStore, MooncakeStore]:
    return open_store(master), open_store(master)


def test_values(stores: tuple[MooncakeStore, MooncakeStore]) -> None:
    one, other = stores
    values = {bytes([i]): np.random.default_rng(i).bytes(5000) for i in range(6)}
    names = [*values]
    for name in names[:5]:
        assert one.put(name, values[name])
    assert other.exists(names) == 5
    assert other.exists(names[::-1]) == 0
    out = np.zeros((6, 5000), np.uint8)
    assert other.get(names, out) == 5
    assert [row.tobytes() for row in out[:5]] == [values[name] for name in names[:5]]
    assert not out[5].any()
    assert other.get(names, np.zeros((6, 4999), np.uint8)) == 0  # no value has this size
    assert one.put(names[0], values[names[0]])  # it is there already
    huge = bytes(8 << 20)
    assert not all(one.put(b"huge %d" % i, huge) for i in range(8)), "there is no room for all"


def test_engines_share_pages(stores: tuple[MooncakeStore, MooncakeStore]) -> None:
    keys = chain("shared", 6)
    one, other = make_store(remote=stores[0]), make_store(remote=stores[1])
    put(one, keys)
    assert one.stats.remote.stored == 6
    assert other.count(keys) == 0
    assert load(other, keys) == 6
    assert other.stats.remote.hits == 6
    assert LAYOUT.page_bytes > 0
    for store in (one, other):
        store.close()


def test_urls() -> None:
    for url in ("mooncake://host", "mooncake://:1", "mooncake://host:99999999"):
        with pytest.raises(ValueError, match="must be mooncake://HOST:PORT"):
            open_remote(url)
    with pytest.raises(ValueError, match="can't be reached"):
        open_remote(f"mooncake://127.0.0.1:{free_port()}")
    for option in ("segments=1", "segment_bytes=1GiB"):
        with pytest.raises(ValueError, match=f"no such option: {option}"):
            open_remote(f"mooncake://127.0.0.1:1?{option}")
