"""Minutes of broken links between servers, and servers that are killed: answers stay right, and nothing is left."""

import contextlib
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from cluster.link_proxy import LinkProxy
from disaggregated import (
    apart,
    body,
    instance,
    make_engine,
    nothing_is_left,
    post,
    prefill,
    release_leases,
    resume,
    resumed,
    tokens_of,
    transfers_of,
)
from serve_process import ServeProcess
from served import Served

from longctx.cluster import prefill as prefill_module
from longctx.cluster.transfer.options import TransferOptions
from longctx.serving.engine import page_transfers

pytestmark = pytest.mark.slow

MINUTES = 2.0
OPTIONS = TransferOptions(block_bytes=1 << 16, read_bytes=1 << 18, silence_timeout=1.0)
SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.5, "seed": 4, "n": 2}]


class Soak:
    """Clients of two servers over links that fail.

    Attributes:
      counts: of requests by what became of them, and of faults.
    """

    def __init__(self, coupled: Served, reader: Served, decoder: Served, links: list[LinkProxy], seed: int) -> None:
        self.reader, self.decoder, self.links = reader, decoder, links
        self._random = np.random.default_rng(seed)
        self.requests = []
        for i in range(12):
            prompt = self._random.integers(0, 250, int(self._random.integers(100, 2500))).tolist()
            self.requests.append(body(prompt, **SAMPLING[i % 3]))
        self.expected = [self._answer(post(coupled, sent).json()) for sent in self.requests]
        self.own = [tokens_of(resume(coupled, resumed(sent["prompt"], None))) for sent in self.requests]
        self.counts: Counter[str] = Counter()
        self.wrong: list[int] = []
        self._end = 0.0

    def run(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes
        with ThreadPoolExecutor(5) as pool:
            work = [pool.submit(self._ask, seed) for seed in range(4)] + [pool.submit(self._break)]
            for each in work:
                each.result()
        for link in self.links:
            link.is_stalled, link.bytes_per_second, link.flip_at = False, None, None

    def _ask(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        while time.monotonic() < self._end:
            number = int(random.integers(len(self.requests)))
            sent = self.requests[number] | {"cache_salt": str(random.integers(2**40))}
            way = str(random.choice(["own", "router", "leaves"], p=[0.5, 0.35, 0.15]))
            own = resumed(sent["prompt"], f"http://{self.links[1].address}")
            own["request"]["cache_salt"] = sent["cache_salt"]
            if way == "leaves":
                url = f"{self.decoder.url}/resume"
                with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", url, json=own, timeout=60):
                    time.sleep(random.random())
                self.counts["left"] += 1
                continue
            if way == "own":
                is_right = tokens_of(resume(self.decoder, own)) == self.own[number]
            else:
                answer = apart(self.reader, self.decoder, sent)
                is_right = self._answer(answer) == self.expected[number]
            self.counts[way] += 1
            if not is_right:
                self.wrong.append(number)

    def _break(self) -> None:
        random = self._random
        while time.monotonic() < self._end:
            link = self.links[random.integers(len(self.links))]
            fault = str(random.choice(["cut", "stalled", "slow", "flipped", "well"]))
            self.counts[fault] += 1
            if fault == "cut":
                link.cut()
            elif fault == "stalled":
                link.is_stalled = True
            elif fault == "slow":
                link.bytes_per_second = 3e5
            elif fault == "flipped" and link is self.links[0]:
                link.flip_at = link.bytes_back + int(random.integers(1, 100_000))
            time.sleep(2 * random.random())
            link.is_stalled, link.bytes_per_second = False, None

    @staticmethod
    def _answer(answer: dict[str, Any]) -> list[Any]:
        return [(each["token_ids"], each["text"], each["finish_reason"]) for each in answer["choices"]]


def soak(minutes: float, seed: int = 0) -> Counter[str]:
    """Run one; what became of requests and transfers."""
    with (
        instance(make_engine()) as coupled,
        instance(make_engine(), "prefill", options=OPTIONS) as reader,
        LinkProxy(f"127.0.0.1:{transfers_of(reader).port}") as pages,
        LinkProxy(f"127.0.0.1:{reader.port}") as requests,
    ):
        transfers_of(reader).port = int(pages.address.rpartition(":")[2])  # what it tells others
        with instance(make_engine(), "decode", options=OPTIONS) as decoder:
            run = Soak(coupled, reader, decoder, [pages, requests], seed)
            run.run(minutes)
            assert not run.wrong
            for server in (reader, decoder):
                server.wait_until("leases end", lambda: not len(reader.server.engine.core.leases), 60)
            nothing_is_left(reader, decoder)
            pages_of = decoder.server.engine.pages
            counts, outcomes = run.counts, transfers_of(decoder).receiver.stats.outcomes
            counts |= Counter({f"transfers {name}": count for name, count in outcomes.items() if count})
            counts["pages recomputed"] = sum(pages_of.recomputed.values())
    return counts


def test_minutes_of_broken_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_transfers, "LEASE_SECONDS", 5.0)
    counts = soak(MINUTES)
    assert min(counts["own"], counts["router"], counts["left"], counts["cut"], counts["stalled"]) > 2
    assert counts["transfers complete"] > 10
    assert counts["transfers lost"] + counts["transfers late"] > 1
    assert counts["pages recomputed"] > 0


def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "secret").write_text("0123456789abcdef" * 4)
    (tmp_path / "secret").chmod(0o600)
    sizes = ["--max-length", "4096", "--num-pages", "300", "--page-size", "16", "--max-running", "8"]
    sizes += ["--token-budget", "64", "--buckets", "64", "--max-logprobs", "5"]
    return [*sizes, "--kv-secret-file", str(tmp_path / "secret"), "--kv-plain"]


LONG = [(i * i + i // 7) % 250 for i in range(3900)]


def key_of(tmp_path: Path) -> bytes:
    from argparse import Namespace

    from longctx.cli.settings import page_hash_key

    key = page_hash_key(Namespace(kv_secret_file=tmp_path / "secret"))
    assert key is not None
    return key


def test_the_reading_server_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the midst of a transfer: the decoding server computes what has not come."""
    monkeypatch.setattr(prefill_module, "_LATER_BYTES", 0)  # pages come while the prompt is read
    given = flags(tmp_path)
    with (
        ServeProcess(*given, "--role", "prefill") as reader,
        instance(make_engine(hash_key=key_of(tmp_path))) as decoder,
    ):
        pages = decoder.server.engine.pages
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(resume, decoder, resumed(LONG, reader.url))
            decoder.wait_until("pages come", lambda: decoder.server.engine.executor.mover.stats.loaded_bytes, 60)
            reader.process.send_signal(signal.SIGKILL)
            tokens = tokens_of(answer.result())
        assert pages.recomputed["transfers"] > 0
        assert transfers_of(decoder).receiver.stats.outcomes["lost"] == 1
        anew = resumed(LONG, None)
        anew["request"]["cache_salt"] = "read here"
        assert tokens == tokens_of(resume(decoder, anew))
        nothing_is_left(decoder)


def test_the_decoding_server_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one reads no further, and keeps no pages."""
    monkeypatch.setattr(page_transfers, "LEASE_SECONDS", 3.0)
    given = flags(tmp_path)
    with instance(make_engine(hash_key=key_of(tmp_path)), "prefill") as reader:
        engine = reader.server.engine
        prefill(reader, body(LONG[:100]))  # so that its programs are compiled
        release_leases(reader)
        read = engine.stats().prompt_tokens
        with ServeProcess(*given, "--role", "decode") as decoder:
            failed: list[httpx.HTTPError] = []

            def ask() -> None:
                try:
                    httpx.post(f"{decoder.url}/resume", json=resumed(LONG, reader.url), timeout=60)
                except httpx.HTTPError as error:
                    failed.append(error)

            asking = threading.Thread(target=ask)
            asking.start()
            reader.wait_until("pages leave", lambda: transfers_of(reader).sender.stats.blocks, 60)
            kept = prefill(reader, body(LONG[:500]))["handoff"]["completions"][0]["lease"]
            decoder.process.send_signal(signal.SIGKILL)
            asking.join()
            assert failed
        assert kept in engine.core.leases
        nothing_is_left(reader)
        assert engine.stats().prompt_tokens - read < len(LONG) + 500
        assert transfers_of(reader).sender.stats.outcomes["complete"] == 0
