"""Decides what each step computes: plain Python over plain data, deterministic, time comes in with each call.

It plans ahead of results: a sampled token's value is not needed to plan its successor's row. So `computed` and
`length` of a sequence run ahead, and a sequence that turns out to have ended leaves some rows in in-flight steps, whose
results are dropped. That is safe, because steps run in order: what a later step writes into a page that was given back
comes after, in every stage. What is done ahead of a step, in all stages at once, is not in that order: so slots rest
until no in-flight batch uses them.

Source: continuous batching with chunked prefill after Mnemosyne, sections 4.1 and 4.3 (a chunk follows the one before
it into the pipeline at once), and Medha, sections 3.1, 4.1 and 4.3.
"""

import functools
from collections.abc import Iterable
from collections.abc import Sequence as List
from typing import Literal

from longctx.serving.kv_cache.connector import TIERS
from longctx.serving.kv_cache.page_pool import Key, PagePool
from longctx.serving.kv_cache.placement import Placer
from longctx.serving.kv_cache.prefix import PartialPage
from longctx.serving.scheduler.admission import Admission
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.serving.scheduler.chunking import Chunker
from longctx.serving.scheduler.forecast import Forecast, PromptTime
from longctx.serving.scheduler.page_planner import Growth, PagePlanner
from longctx.serving.scheduler.policy import by_urgency
from longctx.serving.scheduler.preemption import Preemption
from longctx.serving.scheduler.running import PageLoads, PageStores, Running
from longctx.serving.scheduler.sequence import Sequence, State
from longctx.serving.scheduler.slo import Slo
from longctx.serving.scheduler.step_budget import Share


class Scheduler:
    """Continuous batching: every step has all decodes, and chunks of prompts as the chunker says.

    Args:
      keeps_pages: something beyond the devices keeps full pages (`PageStores`).

    Attributes:
      waiting: sequences that are not admitted, in order of arrival.
      running: those that hold slots and pages.
      is_optimistic: whether prompts are admitted when they fit, and others may be preempted.
      steps_between_chunks: after how many steps the next chunk of a prompt may follow one: 1, the sequence pipeline.
      mixes_decodes: whether steps with prompts have decodes too; if not, decodes wait until no prompt has room.
    """

    def __init__(
        self,
        chunker: Chunker,
        pool: PagePool,
        page_size: int,
        max_running: int,
        admission: Literal["reserve", "optimistic"] = "reserve",
        slo: Slo | None = None,
        placer: Placer | None = None,
        keeps_pages: bool = False,
    ) -> None:
        placer, self.is_optimistic = placer or Placer(), admission == "optimistic"
        self.chunker, self.pool, self.plan = chunker, pool, chunker.plan
        self.stores = PageStores(self.plan.stage, pool.windows) if keeps_pages else None
        if self.stores is not None:
            pool.on_evict = self.stores.note_evicted
        self.running = Running(pool, page_size, max_running, self.stores, self.plan.stage)
        rows, rank_tokens = chunker.chunking.tokens, pool.per_rank * page_size
        time = PromptTime(chunker.predictor, chunker.rule, placer, rows, page_size, rank_tokens)
        self.forecast = Forecast(chunker.predictor, time, self.plan, slo or Slo())
        self.growth = Growth(
            self.running,
            placer,
            self.forecast,
            rows * (self.plan.context if self.plan.shards_rows else 1),
            self.is_optimistic,
        )
        self._preemption = Preemption(self.running, self.growth, self.forecast, chunker.policy, self._preempt)
        self.planner = PagePlanner(self.running, placer, self.growth, self.is_optimistic)
        self.admission = Admission(
            self.running,
            self.planner,
            chunker,
            self.forecast,
            self.growth,
            self._preemption,
            self.is_optimistic,
        )
        self.waiting = self.admission.waiting
        self.loads = PageLoads(self.running, self.forecast, self._preempt)
        self._all_ranks = tuple(range(self.plan.context))
        self._page_size = page_size
        self.num_preempted = 0
        self.num_steps = 0
        self.steps_between_chunks = 1
        self.mixes_decodes = True

    def count_cached(self, keys: List[Key]) -> int:
        """Tokens of the longest prefix of such pages that is in the cache."""
        return len(self.pool.leading(keys)) * self._page_size

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the queue; it has been checked."""
        available = min(sequence.available, sequence.length - 1) if sequence.may_share else 0
        sequence.available = available if sequence.tail_key else available - available % self._page_size
        found = self.count_cached(sequence.keys) if sequence.may_share else 0
        sequence.prefix_hit_tokens = max(found, sequence.available)
        self.forecast.promise(sequence)
        self.chunker.tenants.enter(sequence)
        self.admission.add(sequence)

    def receive(self, sequence: Sequence) -> None:
        """A planned sample of the sequence has arrived, and `keys` been extended by the page that it completes."""
        sequence.in_flight -= 1
        assert sequence.in_flight >= 0
        if sequence.registered < len(sequence.keys) and sequence.is_running:
            self.running.register(sequence)

    def finish(self, sequence: Sequence, partial_page: PartialPage | None = None) -> None:
        """End a sequence, whatever its state: it gives everything back.

        `partial_page` leaves its last page to the next turn of its session.
        """
        if sequence.state is State.WAITING:
            self.admission.remove(sequence)
        else:
            self.running.register(sequence)
            if partial_page is not None and partial_page.number < len(sequence.pages):
                self.pool.register(sequence.pages[partial_page.number], partial_page.key)
            self._release(sequence)
        sequence.to(State.FINISHED)
        self.chunker.tenants.leave(sequence)

    def schedule(self, now: float) -> Batch | None:
        """The next step, or None if there is nothing to compute."""
        batch = Batch(self.num_steps)
        if self.stores is not None:
            self.stores.step = batch.index
        self.running.release_seen(batch.index)
        self.forecast.rescale_predictions(self.waiting, self.running.prefilling)
        if self.mixes_decodes:
            self._plan_decodes(batch)
        self.running.slots.reclaim(batch.index)
        self._grow_prompts(batch, now)
        self.admission.admit(batch, now)
        self.loads.begin(batch)
        prompts = [s for s in self._prompts(batch) if s.plannable > 0]
        for sequence, share in self._pack(batch, prompts, now).items():
            self._plan_prompt(batch, sequence, share)
        if not (self.mixes_decodes or batch.chunks):
            self._plan_decodes(batch)
        batch.chunks = self.chunker.rule.place_single_rows(batch.chunks)
        if self.stores is not None:
            batch.stores = self.stores.take()
        if not batch.chunks:
            if not (batch.stores or batch.loads or batch.dropped):
                assert not batch.admitted
                return None
            return self._without_rows(batch)
        batch.exchange, works = self.chunker.rule.choose(batch.chunks)
        seconds = list(map(self.chunker.predictor.seconds, works))
        batch.predicted, batch.rank_seconds = max(seconds), tuple(seconds)
        batch.work = works[seconds.index(batch.predicted)]
        self.chunker.note(batch.chunks)
        self.num_steps += 1
        return batch

    def idle(self) -> Batch:
        """A step that computes nothing, so that batches in later stages go on."""
        return self._without_rows(Batch(self.num_steps))

    @property
    def only_decodes(self) -> bool:
        """Whether steps decode all running sequences and nothing else, until one of them ends or needs a page."""
        running, slots = self.running, self.running.slots
        if running.prefilling or not running.decoding or slots.draining:
            return False
        if (self.waiting and (slots.free or self.is_optimistic)) or self.admission.blocked is not None:
            return False
        is_plain = self.plan.context == 1 and self.stores is None and self.forecast.factor == 1.0
        return is_plain and self.chunker.predictor.is_confirmed

    def advance(self, times: int, batches: Iterable[Batch], predicted: List[float]) -> None:
        """Advance as if the decodes of the last batches, one a stage, had been planned `times` more times.

        Args:
          times: how often.
          batches: as they are afterwards.
          predicted: seconds of the steps that have ended meanwhile.
        """
        steps = times * self.plan.stage
        for sequence in self.running.decoding:
            sequence.computed += times
            sequence.length += times
            sequence.ready += steps
        self.num_steps += steps
        self.chunker.predictor.confirm(predicted)
        self.chunker.advance(steps, [batch.chunks for batch in batches])

    def _without_rows(self, batch: Batch) -> Batch:
        self.num_steps += 1
        self.chunker.note([])
        return batch

    @property
    def is_held_up(self) -> bool:
        """Whether some idle steps let those who wait be admitted, or pages be stored."""
        return bool((self.waiting and self.running.slots.draining) or self.stores)

    def _plan_decodes(self, batch: Batch) -> None:
        page_size, ready = self._page_size, batch.index + self.plan.stage
        sharded = self.chunker.rule.shards_decodes()
        all_ranks = self._all_ranks if sharded else ()
        index, chunks, decoding = batch.index, batch.chunks, State.DECODING
        # The first to be preempted comes last: a sequence that is preempted for another is not in the batch yet.
        for sequence in tuple(self.running.decoding):
            start = sequence.computed
            if sequence.ready > index or sequence.is_drained or sequence.state is not decoding:
                continue  # its token is still in the stages, or all is planned, or it was preempted for one before it
            assert sequence.slot is not None
            if start == len(sequence.pages) * page_size:
                if sequence.promised and not any(sequence.reserved):
                    self.growth.place_promised(sequence)
                elif not self._preemption.make_room(sequence):
                    continue
                self._extend_pages(batch, sequence, start + 1)
            ranks = all_ranks or self.plan.computing_ranks(sequence.ranks)
            chunks.append(Chunk(sequence, sequence.slot, start, 1, True, True, ranks, sharded))
            sequence.computed = start + 1
            sequence.length += 1
            sequence.in_flight += 1
            sequence.ready = ready

    def _pack(self, batch: Batch, prompts: list[Sequence], now: float) -> dict[Sequence, Share]:
        """Return the shares of prompts in the step, beside its decodes, which may become replicated rows for them."""
        rule, decodes, in_stages = self.chunker.rule, batch.chunks, self._in_stages(batch)
        beside = max(prompts, key=lambda sequence: sequence.remaining, default=None)
        if beside is None or not rule.shards_decodes():
            return self.chunker.pack(prompts, decodes, now, in_stages)
        for sharded in (rule.shards_decodes(len(decodes), beside), False) if decodes else (False,):
            batch.chunks = [chunk._replace(sharded=sharded) for chunk in decodes]
            shares = self.chunker.pack(prompts, batch.chunks, now, in_stages)
            # All together they may take another exchange than the longest, for which replicated rows need room.
            if self._has_room(batch, shares):
                return shares
        while any(share.num_tokens > 1 for share in shares.values()) and not self._has_room(batch, shares):
            longest = max(shares, key=lambda sequence: shares[sequence].num_tokens)
            count = max(1, shares[longest].num_tokens - self.plan.context)
            shares[longest] = shares[longest]._replace(num_tokens=count)
        return shares

    def _has_room(self, batch: Batch, shares: dict[Sequence, Share]) -> bool:
        """Whether a step has room for its decodes and such shares of prompts, with the exchange that they take."""
        chunks = [*batch.chunks, *(_chunk(sequence, share) for sequence, share in shares.items())]
        return self.chunker.rule.has_room(self.chunker.rule.place_single_rows(chunks))

    def _prompts(self, batch: Batch) -> list[Sequence]:
        """Prompts of which rows may be in a batch."""
        prompts, index = self.running.prefilling, batch.index
        return [s for s in prompts if s.ready <= index and s.state is not State.LOADING]

    def _grow_prompts(self, batch: Batch, now: float) -> None:
        """Promise prompts what they need in this step, the most urgent first; others may give way to them."""
        due = [sequence for sequence in self._prompts(batch) if self.growth.is_due(sequence)]
        for sequence in by_urgency(self.chunker.policy, due, now, self.chunker.tenants) if due else ():
            if sequence.state is not State.PREFILLING or self.growth.grow(sequence):
                continue  # preempted for another one of these, or it has what it needs
            fits = functools.partial(self.growth.could_grow, sequence)
            is_given_way = self.is_optimistic and self._preemption.make_way(sequence, now, fits)
            if not (is_given_way and self.growth.grow(sequence)):
                batch.blocked.append(sequence)

    def _in_stages(self, batch: Batch) -> list[Sequence]:
        """Sequences whose decodes are in later stages while a batch is in the first."""
        if self.plan.stage == 1 or not self.chunker.heeds_targets:
            return []
        last = batch.index + self.plan.stage
        return [s for s in self.running.decoding if batch.index < s.ready < last and s.length > s.prompt_length + 1]

    def _plan_prompt(self, batch: Batch, sequence: Sequence, share: Share) -> None:
        """Add a prompt's next tokens to the batch."""
        start, count = sequence.computed, share.num_tokens
        assert 0 < count <= sequence.remaining
        chunk = _chunk(sequence, share)
        self._extend_pages(batch, sequence, start + count)
        batch.chunks.append(chunk)
        sequence.computed += count
        self.running.prompt_rows += count
        self.running.note_advance(sequence)
        self.running.register(sequence)
        if chunk.samples:
            sequence.length += 1
            sequence.in_flight += 1
            sequence.ready = batch.index + self.plan.stage
            self.running.begin_decode(sequence)
        else:
            sequence.ready = batch.index + self.steps_between_chunks
            self.forecast.advance(sequence, count)

    def _extend_pages(self, batch: Batch, sequence: Sequence, tokens: int) -> None:
        """Give a sequence the pages of its first `tokens` tokens."""
        if tokens > len(sequence.pages) * self._page_size:
            batch.tables.append(self.running.extend(sequence, tokens, sequence.computed))

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        sequence.preemptions += 1
        sequence.tokens_to_recompute = sequence.computed
        sequence.prefix_hit_tokens = sequence.registered * self._page_size if sequence.may_share else 0
        if self.stores is not None and sequence.source == TIERS:
            sequence.available = sequence.prefix_hit_tokens
        self._release(sequence)
        self.forecast.update(sequence)
        sequence.to(State.WAITING)
        self.admission.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.loads.forget(sequence)
        # The last batch planned is in the last stage `stage - 1` steps later.
        self.running.release(sequence, self.num_steps - 1 + self.plan.stage)


def _chunk(sequence: Sequence, share: Share) -> Chunk:
    """A prompt's next tokens."""
    start, count = sequence.computed, share.num_tokens
    assert sequence.slot is not None
    return Chunk(sequence, sequence.slot, start, count, count == sequence.remaining, False, share.ranks, share.sharded)
