"""Loaded pages are computed again in idle time: wrong ones are found, whatever their checksums, and nobody waits."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dense_oracle import LENGTH
from fake_device import expected_tokens
from memory_store import MemoryStore
from process_threads import run_processes
from test_stored_pages import LAYOUT, oracle
from tiered_fake import TieredExecutor, make_tiered_engine, settle

from longctx.models.validation import FP8_KV
from longctx.serving import Engine, EngineConfig, ParallelPlan, Request, SamplingParams
from longctx.serving.distributed import ProcessGroup
from longctx.serving.engine.thread import EngineThread
from longctx.serving.engine.verification import TOLERANCE, agree
from longctx.serving.kv_cache.connector import Loaded, PageStore, assemble
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.recording.reader import RecordedLog
from longctx.serving.recording.recorder import open_recorder
from longctx.serving.request.handoff import Handoff
from longctx.simulation.incident.replayer import Replayer

FIVE = SamplingParams(max_tokens=5, ignore_eos=True)
PROMPT = [i % 50 for i in range(40)]
SIZES: dict[str, Any] = {
    "page_size": 8,
    "num_pages": 24,
    "max_running": 6,
    "token_budget": 16,
    "buckets": (16,),
    "max_length": LENGTH,
    "hash_key": bytes(16),
    "verify_share": 1.0,
}


class WrongExecutor(TieredExecutor):
    """Its pages leave the devices wrong, so that their checksums are right."""

    wrong_pages: tuple[int, ...] = ()  # by number in the sequence

    def poll_loads(self, timeout: float = 0.0) -> list[Loaded]:
        """Loads take no time, so that they always pay."""
        return [loaded._replace(seconds=0.0) for loaded in super().poll_loads(timeout)]

    def open_store(self, config: EngineConfig, fingerprint: bytes = b"fake") -> TieredStore:
        store = super().open_store(config, fingerprint)
        put = store.put

        def put_wrong(stores: list[PageStore], read: Any) -> None:
            for row, page in enumerate(stores):
                if page.number in self.wrong_pages:
                    read._data[row, 0, 0, 1] += 1
            put(stores, read)

        store.put = put_wrong  # type: ignore[method-assign, assignment]
        return store


def engine_of(folder: Path | None = None, share: float = 1.0, **options: Any) -> Engine:
    tiers = TierConfig(2**16) if folder is None else TierConfig(2**16, 2**20, str(folder))
    return make_tiered_engine(tiers=tiers, verify_share=share, executor_of=WrongExecutor, **options)


def ask(engine: Engine, prompt: list[int] = PROMPT) -> list[int]:
    """An answer by pages of tiers, which are compared then."""
    engine.core.pool.clear()
    (output,) = engine.generate(Request(prompt, FIVE, tenant="someone"))
    settle(engine)
    return output.token_ids


def wait_verified(engine: Engine, count: int) -> tuple[int, int]:
    stats, end = engine.pages.verifier.stats, time.monotonic() + 20
    while stats.verified < count:
        assert time.monotonic() < end
        time.sleep(0.005)
    time.sleep(0.05)
    engine.stats()  # what was asked for between steps is done
    return stats.verified, stats.mismatches


@pytest.mark.parametrize("plan", [ParallelPlan(), ParallelPlan(2, 3, rank_tokens=8)], ids=["one", "stages and ranks"])
def test_right_pages_are_found_right(plan: ParallelPlan) -> None:
    engine = engine_of(plan=plan)
    assert ask(engine) == expected_tokens(PROMPT, FIVE)
    assert not engine.pages.verifier.has_work
    pages = engine.stats().pages_cached
    stored = engine.pages.store.stats.host.stored  # type: ignore[union-attr]
    for _ in range(2):
        assert ask(engine) == expected_tokens(PROMPT, FIVE)
    assert wait_verified(engine, 18) == (18, 0)
    # What was computed for that is found by nobody, held by nobody, and kept nowhere.
    stats = engine.stats()
    assert (stats.pages_held, stats.pages_cached, stats.running, stats.waiting) == (0, pages, 0, 0)
    assert engine.pages.store.stats.host.stored == stored  # type: ignore[union-attr]
    assert len(engine.core.leases) == 0
    engine.pages.close()


def test_pages_that_were_written_wrong_are_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(tmp_path)
    executor: Any = engine.executor
    executor.wrong_pages = (4,)
    right = expected_tokens(PROMPT, FIVE)
    assert ask(engine) == right  # it was computed
    assert ask(engine) != right  # its pages came back, and no checksum is wrong
    assert wait_verified(engine, 9) == (9, 1)
    store = engine.pages.store
    assert isinstance(store, TieredStore)
    assert store.stats.host.corrupt == store.stats.disk.corrupt == 0
    keys = engine.prepare(Request(PROMPT, tenant="someone")).keys
    assert keys[4].hex() in caplog.text
    # It is gone, and so is what was computed from it; its beginning is there, as far as it is in other files.
    assert [store.tier_of(key) for key in keys[4:]] == [None] * 6
    assert [engine.core.pool.find(key) for key in keys[4:]] == [None] * 6
    executor.wrong_pages = ()
    assert [ask(engine), ask(engine)] == [right, right]
    engine.pages.close()
    # Not even a restart finds it.
    engine = engine_of(tmp_path)
    assert ask(engine) == right
    settle(engine)
    assert engine.pages.verifier.stats.mismatches == 0
    engine.pages.close()


@pytest.mark.parametrize("wrong", [None, 2])
def test_pages_of_other_engines_are_verified_too(wrong: int | None) -> None:
    one, other = engine_of(), engine_of()
    request = Request(PROMPT, FIVE, tenant="someone")
    (output,) = one.generate(dataclasses.replace(request, sampling=dataclasses.replace(FIVE, max_tokens=2), lease="a"))
    lease = one.pages.lease("a")
    layout = one.executor.page_layout
    pages = np.zeros((len(lease.pages), *layout.shape), layout.bits)
    assemble(one.pages.read("a", 0, len(lease.pages), (0, layout.num_layers)).result(), pages, layout.whole)
    source: Any = MemoryStore(layout)
    source.release = lambda: None
    source.pages = dict(zip(lease.keys, pages, strict=True))
    if wrong is not None:
        source.pages[lease.keys[wrong]][0, 0, 1] += 1
    other.submit(request, handoff=Handoff.of([output]), sources={"a": source})
    events = []
    while other.has_work:
        events += other.step()
    tokens = [token for event in events for token in event.token_ids]
    assert (tokens == expected_tokens(PROMPT, FIVE)) == (wrong is None)
    assert wait_verified(other, 10) == (10, 0 if wrong is None else 1)
    assert wrong is None or other.core.pool.find(lease.keys[wrong]) is None
    for engine in (one, other):
        engine.pages.close()


def test_whoever_comes_ends_what_is_computed_for_comparison() -> None:
    engine = engine_of()
    ask(engine)
    engine.core.pool.clear()
    engine.generate(Request(PROMPT, FIVE, tenant="someone"))
    assert engine.pages.verifier.has_work
    for _ in range(3):
        while not engine.pages.verifier._current:
            engine.step()
        engine.step()
        assert engine.core.stats().running == 1
        started = engine.core.stats().steps
        (output,) = engine.generate(Request([9, 9, 9], FIVE))
        assert output.token_ids == expected_tokens([9, 9, 9], FIVE)
        # Nothing ran beside it, and no step before it.
        assert engine.core.stats().steps - started <= 5 + engine.config.run_ahead
    settle(engine)
    assert wait_verified(engine, 9) == (9, 0)
    assert engine.stats().pages_held == 0
    engine.pages.close()


def test_a_load_that_is_always_interrupted_is_given_up() -> None:
    engine = engine_of()
    ask(engine)
    engine.core.pool.clear()
    engine.generate(Request(PROMPT, FIVE, tenant="someone"))
    for _ in range(9):
        assert engine.pages.verifier.has_work
        while not engine.pages.verifier._current:
            engine.step()
        engine.generate(Request([9, 9, 9], FIVE))
    assert not engine.pages.verifier.has_work
    engine.pages.close()


def test_the_share_of_loads() -> None:
    engine = engine_of(share=0.3)
    ask(engine)
    for _ in range(40):
        ask(engine)
    verified, mismatches = wait_verified(engine, 1)
    assert verified % 9 == mismatches == 0
    assert 4 < verified / 9 < 22
    engine.pages.close()


def test_a_server_verifies_when_it_is_idle() -> None:
    engine = engine_of()
    with EngineThread(engine) as thread:
        for _ in range(2):
            engine.core.pool.clear()
            thread.submit(engine.prepare(Request(PROMPT, FIVE)), lambda events: None)
            assert thread.wait_idle(20)
            assert engine.pages.store is not None
            end = time.monotonic() + 20
            while engine.has_work:
                assert time.monotonic() < end
                time.sleep(0.002)
            engine.pages.store.flush(20)
        assert wait_verified(engine, 9) == (9, 0)
    engine.pages.close()


def test_all_processes_of_an_engine_throw_wrong_pages_out_and_keep_pinned_ones() -> None:
    def act(group: ProcessGroup) -> tuple[list[str | None], int]:
        engine = engine_of(group=group)
        store = engine.pages.store
        assert isinstance(store, TieredStore)
        keys = engine.prepare(Request(PROMPT)).keys
        executor: Any = engine.executor
        executor.wrong_pages = (4,)
        if not group.is_first:
            engine.follow()
        else:
            for number in (0, 1, 2, 0):  # the others take the memory of the first
                engine.generate(Request([*PROMPT[number:], *PROMPT[:number]], FIVE))
                settle(engine)
                engine.scheduler.loads.seconds_per_page = None
            assert wait_verified(engine, 1)[1] == 1
            engine.pages.pin(keys[:3], 60.0)
            engine.generate(Request([1, 2, 3], FIVE))
        return [store.tier_of(key) for key in keys], store.stats.host.pinned_bytes

    ends = run_processes(2, act)
    assert ends == [(["host"] * 4 + [None] * 6, 3 * 32)] * 2


def test_a_server_that_ends_verifies_no_more() -> None:
    engine = engine_of()
    ask(engine)
    engine.core.pool.clear()
    engine.generate(Request(PROMPT, FIVE, tenant="someone"))
    while not engine.pages.verifier._current:
        engine.step()
    thread = EngineThread(engine)
    thread.close()
    with thread:
        pass
    assert not engine.has_work
    stats = engine.stats()
    assert (stats.running, stats.pages_held, len(engine.core.leases)) == (0, 0, 0)
    engine.pages.close()


def test_a_recorded_engine_verifies_too(tmp_path: Path) -> None:
    engine = engine_of()
    recorder = open_recorder(tmp_path)
    executor: Any = engine.executor
    engine = Engine(
        engine.model, None, engine.config, executor=executor, clock=executor.clock, recorder=recorder,
        store=engine.pages.store,
    )  # fmt: skip
    executor.wrong_pages = (2,)
    with recorder:
        for _ in range(3):
            recorder.note_clear()
            ask(engine)
        assert wait_verified(engine, 9)[1] >= 1
    assert len(list(Replayer(RecordedLog(recorder.directory)).run())) > 10  # which decides the same
    engine.pages.close()


@pytest.mark.parametrize("kv_dtype", [None, FP8_KV])
def test_on_devices_what_is_computed_again_agrees(tmp_path: Path, kv_dtype: str | None) -> None:
    """A chunk computes again what decodes computed, in steps of another shape, so some last bits differ."""
    random = np.random.default_rng(0)
    tiers, options = TierConfig(2**20, 2**20, str(tmp_path)), SIZES | {"buckets": (1, 16), "kv_dtype": kv_dtype}
    engine = Engine(oracle().model, oracle().params, EngineConfig(tiers=tiers, **options))
    for _ in range(2):
        prompt = random.integers(0, 50, 20).tolist()
        (output,) = engine.generate([prompt], SamplingParams(max_tokens=45, ignore_eos=True))
        settle(engine)
        engine.core.pool.clear()
        engine.scheduler.loads.seconds_per_page = None
        engine.generate([[*prompt, *output.token_ids]], FIVE)
        settle(engine)
    assert wait_verified(engine, 16) == (16, 0)
    engine.pages.close()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_agrees(dtype: str) -> None:
    kind, layout = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype), LAYOUT._replace(dtype=dtype)
    right = np.random.default_rng(0).standard_normal(layout.shape).astype(np.float32)
    right[1] *= 100  # a layer of its own scale
    noise = TOLERANCE[dtype] * np.abs(right).max((2, 3, 4), keepdims=True)

    def bits(page: np.ndarray) -> np.ndarray:
        if dtype != FP8_KV:
            return page.astype(kind).view(layout.bits)
        scale = np.abs(page).max(-1, keepdims=True).astype(np.float32) / 448
        with np.errstate(invalid="ignore"):
            values = (page / scale).astype(kind)
        return np.concatenate([values.view(np.uint8), scale.view(np.uint8)], -1)

    assert agree(bits(right), bits(right), dtype)
    assert agree(bits(right + noise / 2), bits(right), dtype)
    assert not agree(bits(right + 2 * noise), bits(right), dtype)
    assert not agree(bits(np.roll(right, 1, axis=2)), bits(right), dtype)
    for value in (30.0, np.nan, np.inf):
        wrong = right.copy()
        wrong[0, 1, 2, 0, 3] = value
        assert not agree(bits(wrong), bits(right), dtype)
        assert not agree(bits(right), bits(wrong), dtype) or value == 30


def test_shares_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="verify_share must be finite and 0 to 1"):
        EngineConfig(verify_share=1.5)
    with pytest.raises(TypeError, match="shares_pages must be"):
        dataclasses.replace(Request([1]), shares_pages=1)  # type: ignore[arg-type]
