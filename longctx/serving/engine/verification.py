"""`Verifier`: recomputation of a share of loaded pages while an engine is idle, and comparison.

A checksum says that a page is what was written. That it was right when it was written, under this key, is only known by
computing it again. A page that differs is found no more, neither on the devices nor beyond them, and neither are those
after it: they were computed from it, perhaps.

Keys and values are computed in steps of other shapes than before, so their last bits may differ: `TOLERANCE`.
"""

import logging
import random
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from longctx.models.footprint import KV_SCALE_BYTES
from longctx.models.validation import FP8_KV
from longctx.serving.engine.active_request import ActiveRequest, ActiveRequests
from longctx.serving.engine.core import Core
from longctx.serving.executor.interface import Executor
from longctx.serving.kv_cache.connector import Loaded, PageKeeper, PageRead, assemble
from longctx.serving.kv_cache.page_layout import PageLayout
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.scheduler.sequence import Sequence, completion_of

logger = logging.getLogger(__name__)

TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2, FP8_KV: 0.5}
"""Largest difference of two numbers that stand for the same, by dtype: relative to the largest of a layer's keys, or
of its values, in a page. Other dtypes may not differ at all.

Last bits carry numbers of float8 pages to the next ones, 32/448 of the largest away, and later layers see it: 0.22 has
been measured (docs/fp8_pages.md)."""

_PREFIX = "longctx-verify-"
_MOST_SAMPLES = 16  # loads that wait; the oldest goes
_MOST_BYTES = 64 * 2**20  # of pages that are compared of a load
_MOST_TRIES = 8  # after as many interruptions a load is given up


class Sample(NamedTuple):
    """Pages of a load: `tokens` `[T]` up to the end of the last of them, and by number in the sequence their keys.

    `chain`: the keys of all pages of the sequence, which goes on.
    """

    tokens: np.ndarray
    tenant: str
    keys: dict[int, Key]
    chain: list[Key]
    tries: int = 0


@dataclass
class VerifyStats:
    """Pages that were compared, and how many of them differed."""

    verified: int = 0
    mismatches: int = 0


class Verifier:
    """Verifier of an engine's loads. Its calls come between steps; a thread compares.

    Args:
      share: of loads whose pages are verified, 0 to 1.
      store: which keeps pages; None: nothing does, and loads come from other engines alone.
      requests: of the engine.
      release, forget: give up a lease, and let pages be found no more; any thread may call them.
    """

    def __init__(
        self,
        share: float,
        core: Core,
        executor: Executor,
        store: PageKeeper | None,
        requests: ActiveRequests,
        release: Callable[[str], object],
        forget: Callable[[list[Key]], object],
    ) -> None:
        self.stats = VerifyStats()
        self._share, self._core, self._executor = share, core, executor
        self._store = store if isinstance(store, TieredStore) else None
        self._requests, self._release, self._forget = requests, release, forget
        self._random = random.Random(0)
        self._samples: deque[Sample] = deque(maxlen=_MOST_SAMPLES)
        self._current: tuple[Sample, ActiveRequest] | None = None
        self._to_compare: SimpleQueue[tuple[Sample, PageRead, list[Key], PageRead | None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_begun = 0

    @property
    def has_work(self) -> bool:
        """Whether loads wait to be verified."""
        return bool(self._samples or self._current)

    def note(self, loaded: Loaded, sequence: Sequence) -> None:
        """Sample, perhaps, a load that has ended and whose sequence has its pages."""
        if not loaded.num_pages or self._random.random() >= self._share:
            return
        size, page_bytes = self._executor.page_layout.page_size, self._executor.page_layout.page_bytes
        stop = sequence.computed // size
        numbers = range(max(0, sequence.computed - loaded.num_pages * size) // size, min(stop, len(sequence.keys)))
        chosen = self._random.sample(numbers, min(len(numbers), max(1, _MOST_BYTES // page_bytes)))
        if chosen:
            completion = completion_of(sequence)
            keys = {number: sequence.keys[number] for number in sorted(chosen)}
            self._samples.append(
                Sample(completion.tokens[: (max(chosen) + 1) * size], sequence.tenant, keys, sequence.keys)
            )

    def poll(self, is_idle: bool) -> None:
        """Begin to compute a sample, if the engine `is_idle` but for that; compare one that is computed."""
        if self._current is None:
            if is_idle and self._samples:
                self._begin_next()
            return
        sample, request = self._current
        if request.is_open:
            return
        self._current = None
        output = request.outputs[0]
        if output.lease is None or output.lease.length < len(sample.tokens):
            return  # it failed, or was ended otherwise
        self._read(sample, output.lease.lease_id)

    def give_way(self) -> None:
        """End what is computed for comparison, as a request has come; it is tried again later."""
        if self._current is not None:
            sample, request = self._current
            self._current = None
            self._requests.leave(request)
            if sample.tries < _MOST_TRIES:
                self._samples.append(sample._replace(tries=sample.tries + 1))

    def close(self) -> None:
        """Stop verifying."""
        self._share = 0.0
        self.give_way()
        self._samples.clear()

    def _begin_next(self) -> None:
        sample = self._samples.popleft()
        self._num_begun += 1
        name = f"{_PREFIX}{self._num_begun}-{secrets.token_hex(8)}"
        prompt: Any = sample.tokens
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        request = Request(prompt, sampling, name, tenant=sample.tenant, lease=name, shares_pages=False, priority=-1)
        self._current = sample, self._requests.begin_own(request)

    def _read(self, sample: Sample, lease_id: str) -> None:
        """Begin to read what was computed, and what was loaded as far as it is on the devices still."""
        lease, layers = self._core.leases.get(lease_id), (0, self._executor.page_layout.num_layers)
        assert lease is not None
        computed = self._executor.read_pages([lease.pages[number] for number in sample.keys], layers)
        found = {key: page for key in sample.keys.values() if (page := self._core.pool.find(key)) is not None}
        there = self._executor.read_pages(list(found.values()), layers) if found else None
        self._release(lease_id)
        self._to_compare.put((sample, computed, list(found), there))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="longctx-verify", daemon=True)
            self._thread.start()

    # In a thread of its own.

    def _work(self) -> None:
        while True:
            sample, computed, found, there = self._to_compare.get()
            try:
                wrong = self._compare(list(sample.keys.values()), computed, found, there)
            except Exception:
                logger.exception("pages could not be compared with what was computed again")
                continue
            self.stats.verified += len(sample.keys)
            self.stats.mismatches += len(wrong)
            if wrong:
                names = ", ".join(key.hex() for key in wrong)
                logger.error("%d pages differ from what was computed again, and are thrown out: %s", len(wrong), names)
                first = sample.chain.index(wrong[0])
                self._forget(sample.chain[first:])

    def _compare(self, keys: list[Key], computed: PageRead, found: list[Key], there: PageRead | None) -> list[Key]:
        """Compare pages with those on the devices and in tiers; the keys of those that differ somewhere."""
        layout, store = self._executor.page_layout, self._store
        own = dict(zip(keys, _pages(layout, computed, len(keys)), strict=True))
        on_devices = {} if there is None else dict(zip(found, _pages(layout, there, len(found)), strict=True))
        wrong = []
        for key, right in own.items():
            is_right = key not in on_devices or agree(on_devices[key], right, layout.dtype)
            if is_right and store is not None and (kept := store.read(key)) is not None:
                part_layers, part_heads = store.part.within(layout.whole)
                is_right = agree(kept, right[part_layers, :, :, part_heads], layout.dtype)
            if not is_right:
                wrong.append(key)
        return wrong


def agree(one: np.ndarray, other: np.ndarray, dtype: str) -> bool:
    """Return whether two pages `[layers, 2, page_size, heads, row_size]`, as bits, are the same but for `TOLERANCE`."""
    if np.array_equal(one, other):
        return True
    if dtype not in TOLERANCE:
        return False
    axes = 2, 3, 4
    with np.errstate(invalid="ignore"):  # of infinite numbers, which agree with none
        a, b = _values(one, dtype), _values(other, dtype)
        limits = TOLERANCE[dtype] * np.abs(b).max(axes)
        return bool((np.isfinite(limits) & (np.abs(a - b).max(axes) <= limits)).all())


def _values(page: np.ndarray, dtype: str) -> np.ndarray:
    """Convert the bits of a page to float32 `[layers, 2, page_size, heads, H]`."""
    if dtype == FP8_KV:
        values, scales = (np.ascontiguousarray(x) for x in np.split(page, [-KV_SCALE_BYTES], -1))
        return values.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales.view(np.float32)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return np.ascontiguousarray(page).view(kind).astype(np.float32)


def _pages(layout: PageLayout, read: PageRead, count: int) -> np.ndarray:
    """Return pages that are read, `[pages, layers, 2, page_size, K, row_size]`; zeros of other processes' parts."""
    out = np.zeros((count, *layout.shape), layout.bits)
    assemble(read.result(), out, layout.whole)
    return out
