"""Engines of one small model whose pages go to host memory and disk, under a few plans that share compiled programs."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
from dense_oracle import LENGTH, VOCAB, Oracle, make_model

from longctx.models import ByteTokenizer
from longctx.serving import Engine, EngineConfig, Output, ParallelPlan, Request, SamplingParams
from longctx.serving.kv_cache.connector import assemble
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.tiers.store import TieredStore

ONE = ParallelPlan()
STAGES = ParallelPlan(2, 1, 2)
RANKS = ParallelPlan(1, 2, 4, placement="interleave", exchange="pass_kv", rank_tokens=16)
PLANS = [ONE, STAGES, RANKS]
PAGE_SIZE, NUM_PAGES = 8, 24
EXACT = SamplingParams(max_tokens=6, ignore_eos=True)


class Letters(ByteTokenizer):
    """Its tokens are letters, so that there are stop strings."""

    vocab_size = VOCAB
    bos_id = None
    eos_ids = ()

    def decode(self, ids: Any) -> str:
        return "".join(chr(ord("A") + int(token)) for token in ids)


@functools.cache
def oracle() -> Oracle:
    return Oracle(make_model(3, 8, 2, 48))


def make_engine(plan: ParallelPlan = ONE, tiers: TierConfig | None = None, **options: Any) -> Engine:
    """An engine, with so little memory that pages are evicted."""
    sizes: dict[str, Any] = {
        "page_size": PAGE_SIZE,
        "num_pages": NUM_PAGES,
        "max_running": 6,
        "token_budget": 16,
        "buckets": (16,),
        "max_length": LENGTH,
    }
    config = EngineConfig(tiers=tiers, hash_key=bytes(16), **(sizes | options))
    return Engine(oracle().model, oracle().params, config, plan=plan, tokenizer=Letters())


def on_disk(folder: Path) -> TierConfig:
    return TierConfig(host_bytes=1 << 20, disk_bytes=1 << 20, disk=str(folder))


@functools.cache
def plain_engine(kv_dtype: str | None = None) -> Engine:
    """What all others with such pages are compared with."""
    return make_engine(prefix_cache=False, kv_dtype=kv_dtype)


def expected(requests: list[Request], kv_dtype: str | None = None) -> list[Output]:
    return plain_engine(kv_dtype).generate([dataclasses.replace(request, session_id=None) for request in requests])


def store_of(engine: Engine) -> TieredStore:
    store = engine.pages.store
    assert isinstance(store, TieredStore)
    return store


def answer(engine: Engine, requests: list[Request]) -> list[Output]:
    """Outputs, once all pages have left the devices. Loads are as quick as computing: nobody predicts they are not."""
    engine.scheduler.loads.seconds_per_page = None
    outputs = engine.generate(requests)
    settle(engine)
    return outputs


def page_bits(engine: Engine, keys: list[bytes]) -> np.ndarray:
    """Pages that are on an engine's devices, `[pages, layers, 2, page_size, K, row_size]`."""
    layout = engine.executor.runner.transfer.layout
    pages = [page for key in keys if (page := engine.core.pool.find(key)) is not None]
    out = np.zeros((len(keys), *layout.shape), layout.bits)
    assemble(engine.executor.read_pages(pages, (0, layout.num_layers)).result(), out, layout.whole)
    return out


def settle(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    if engine.pages.store is not None:
        assert engine.pages.store.flush(30)


def conversation(random: np.random.Generator, turns: int, longest: int = 120) -> list[list[int]]:
    """Prompts of which most begin like one before."""
    prompts: list[list[int]] = []
    for _ in range(turns):
        before = prompts[random.integers(len(prompts))] if prompts and random.random() < 0.7 else []
        prompts.append([*before, *random.integers(0, VOCAB, random.integers(8, 50)).tolist()][:longest])
    return prompts
