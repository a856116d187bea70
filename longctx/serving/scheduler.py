"""Decides what each step computes: plain Python over plain data, deterministic, time comes in with each call.

It plans ahead of results: a sampled token's value is not needed to plan its successor's row. So `computed` and
`length` of a sequence run ahead, and a sequence that turns out to have ended leaves some rows in steps already under
way, whose results nobody takes. That is safe, because steps run in order: what a later step writes into a page or a
slot that was given back comes after.

Source: continuous batching with chunked prefill after Mnemosyne, section 4.1, and Medha, sections 3.1 and 4.1.
"""

import bisect
from typing import Any, Literal

from longctx.serving.batch import Batch, Chunk, TableRun
from longctx.serving.packing import Packer
from longctx.serving.pages import PagePool
from longctx.serving.policy import rank, relative_slack
from longctx.serving.predictor.work import Work
from longctx.serving.sequence import Sequence, State, Tail
from longctx.serving.slo import Slo

# A change of predictions that is worth making them anew.
_NOTABLE = 0.05


class Scheduler:
    """Continuous batching: in every step all decodes, and chunks of prompts as the packer says."""

    def __init__(
        self,
        packer: Packer,
        pool: PagePool,
        page_size: int,
        max_running: int,
        admission: Literal["reserve", "optimistic"] = "reserve",
        slo: Slo | None = None,
    ) -> None:
        self.packer, self.pool, self.page_size = packer, pool, page_size
        self.max_running, self.admission, self.slo = max_running, admission, slo or Slo()
        self.waiting: list[Sequence] = []  # these three in order of arrival
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.num_preempted = 0
        self.num_steps = 0
        self._factor = packer.predictor.factor
        self._slots = list(range(max_running - 1, -1, -1))
        self._forks: list[tuple[Sequence, tuple[int, int]]] = []  # and the page that each copies, in the next step

    # What comes in.

    def check(self, prompt_length: int, max_tokens: int, samples: int) -> None:
        """ValueError if such a request could never be admitted: pool or slots are too few for it alone."""
        if samples > self.max_running:
            raise ValueError(
                f"n={samples} continuations are more than the max_running={self.max_running} of the engine"
            )
        own = self._pages_of(prompt_length + max_tokens - 1)
        at_first = own if self.admission == "reserve" else self._pages_of(prompt_length)
        shared = self._shared_by_followers(prompt_length)
        needed = max(own, at_first + (samples - 1) * (at_first - shared))
        if needed > self.pool.num_pages:
            raise ValueError(
                f"prompt and max_tokens need {needed} pages of {self.page_size} tokens, "
                f"more than the {self.pool.num_pages} that the engine has"
            )

    def count_cached(self, keys: list[Any]) -> int:
        """Tokens of the longest prefix of such pages that is in the cache."""
        missing = (i for i, key in enumerate(keys) if self.pool.find(key) is None)
        return next(missing, len(keys)) * self.page_size

    def add(self, sequence: Sequence) -> None:
        """Put a sequence, with its followers, into the queue; ValueError as from `check`."""
        self.check(sequence.prompt_length, sequence.max_tokens, 1 + len(sequence.followers))
        sequence.findable = self.count_cached(sequence.keys) if sequence.may_share else 0
        self._promise(sequence)
        self._look_ahead(sequence)
        bisect.insort(self.waiting, sequence, key=_arrival)

    def receive(self, sequence: Sequence) -> None:
        """A planned sample of the sequence has arrived, and `keys` been extended by the page that it completes."""
        sequence.in_flight -= 1
        assert sequence.in_flight >= 0
        if sequence.is_running:
            self._register(sequence)

    def finish(self, sequence: Sequence, tail: Tail | None = None) -> None:
        """End a sequence, whatever its state: it gives everything back. Followers that wait for it end too.

        `tail` leaves its last, partial page to the next turn of its session.
        """
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            if tail is not None and tail.number < len(sequence.pages):
                self.pool.register(sequence.pages[tail.number], tail.key)
            self._remove(sequence)
        sequence.to(State.FINISHED)
        for follower in sequence.followers:
            follower.to(State.FINISHED)
        sequence.followers = []

    def _promise(self, sequence: Sequence) -> None:
        """When its first token is due, and that of its followers, and how long each may take."""
        ttft = sequence.ttft_deadline
        if ttft is None:
            rows = self.packer.chunking.tokens
            ttft = self.slo.ttft(self.packer.predictor.prefill_seconds(0, sequence.prompt_length, rows))
        for each in (sequence, *sequence.followers):
            each.deadline, each.patience = each.arrival + ttft, ttft
            each.tpot_target = self.slo.tpot if each.tpot_target is None else each.tpot_target

    # What goes out.

    def schedule(self, now: float) -> Batch | None:
        """The next step, or None if there is nothing to compute."""
        batch = Batch(self.num_steps)
        self._heed_corrections()
        decodes = self._plan_decodes(batch)
        self._set_up_forks(batch)
        self._admit(batch, now)
        work = Work.of(batch.chunks)
        for sequence, count in self.packer.pack(self.prefilling, decodes, work, now):
            assert 0 < count <= sequence.remaining
            self._plan(batch, sequence, count)
            self._look_ahead(sequence)
        if not batch.chunks:
            assert not batch.admitted
            return None
        for chunk in batch.chunks:
            if chunk.samples and not chunk.decodes:
                self._begin_decoding(chunk.sequence)
        batch.work = Work.of(batch.chunks)
        batch.predicted = self.packer.predictor.seconds(batch.work)
        self.num_steps += 1
        return batch

    def _plan_decodes(self, batch: Batch) -> list[Sequence]:
        decodes = []
        # The most dispensable last: whoever is put back for another is not in the batch yet.
        for sequence in sorted(self.decoding, key=_dispensable):
            if sequence.state is not State.DECODING or sequence.is_drained:
                continue  # put back for one before it, or all is planned
            if sequence.computed == len(sequence.pages) * self.page_size and not self._make_room(sequence):
                continue
            self._plan(batch, sequence, 1)
            decodes.append(sequence)
        return decodes

    def _plan(self, batch: Batch, sequence: Sequence, count: int) -> None:
        """Add the next tokens of a sequence to the batch."""
        start = sequence.computed
        first = len(sequence.pages)
        assert sequence.slot is not None
        if start + count > first * self.page_size:
            for _ in range(first, self._pages_of(start + count)):
                reserved = sequence.reserved > 0
                sequence.reserved -= reserved
                sequence.pages.append(self.pool.allocate(reserved))
            batch.tables.append(TableRun(sequence.slot, first, sequence.pages[first:]))
        samples = count == sequence.remaining
        decodes = sequence.state is State.DECODING
        batch.chunks.append(Chunk(sequence, sequence.slot, start, count, samples, decodes))
        sequence.computed += count
        if samples:
            sequence.length += 1
            sequence.in_flight += 1
        if sequence.registered < sequence.computed // self.page_size:
            self._register(sequence)

    def _look_ahead(self, sequence: Sequence) -> None:
        """Predict how long its prompt takes from here on."""
        predictor, rows = self.packer.predictor, self.packer.chunking.tokens
        start = min(max(sequence.computed, sequence.findable), sequence.length - 1)
        sequence.rest = predictor.prefill_seconds(start, sequence.length, rows)

    def _heed_corrections(self) -> None:
        """Where the device turns out to be another than predicted, what was predicted for all prompts is, anew.

        Else those who came before would be compared with those who came after by different measures.
        """
        factor = self.packer.predictor.factor
        if abs(factor / self._factor - 1) > _NOTABLE:
            self._factor = factor
            for sequence in (*self.waiting, *self.prefilling):
                self._promise(sequence)
                self._look_ahead(sequence)

    def _begin_decoding(self, sequence: Sequence) -> None:
        """A prompt is planned to its end: its sequence decodes from the next step on, its followers fork off."""
        self.prefilling.remove(sequence)
        sequence.to(State.DECODING)
        bisect.insort(self.decoding, sequence, key=_arrival)
        full = self._shared_by_followers(sequence.prompt_length)
        for follower in sequence.followers:
            # Full pages are shared. The one with the prompt's last token is copied, since every sample goes on in it
            # differently, and that token is computed again: its logits are drawn from once more.
            for page in sequence.pages[:full]:
                self.pool.share(page)
            follower.reserved -= 1
            copy = self.pool.allocate(reserved=True)
            follower.pages = [*sequence.pages[:full], copy]
            follower.keys = list(sequence.keys)
            follower.registered = full
            follower.computed = follower.cached = follower.prompt_length - 1
            self._look_ahead(follower)
            follower.slack = sequence.slack
            follower.to(State.PREFILLING)
            bisect.insort(self.prefilling, follower, key=_arrival)
            self._forks.append((follower, (sequence.pages[full], copy)))
        sequence.followers = []

    def _set_up_forks(self, batch: Batch) -> None:
        for follower, copy in self._forks:
            if follower.slot is not None:  # not cancelled or put back meanwhile
                batch.admitted.append(follower)
                batch.copies.append(copy)
                batch.tables.append(TableRun(follower.slot, 0, list(follower.pages)))
        self._forks = []

    # Admission.

    def _admit(self, batch: Batch, now: float) -> None:
        if not self.waiting or not self._slots:
            return
        for sequence in rank(self.packer.policy, self.waiting, now):
            if not self._try_to_admit(batch, sequence):
                break  # nobody overtakes: else a large request might wait for ever
            sequence.slack = relative_slack(sequence, now)
            self.waiting.remove(sequence)

    def _try_to_admit(self, batch: Batch, sequence: Sequence) -> bool:
        if len(self._slots) < 1 + len(sequence.followers) or sequence.in_flight:
            return False
        # All that it may ever compute, or only what it has to before it can sample.
        reach = sequence.prompt_length + sequence.max_tokens - 1
        total = self._pages_of(reach if self.admission == "reserve" else min(sequence.length, reach))
        of_follower = total - self._shared_by_followers(sequence.prompt_length)
        # Where nothing is promised, running sequences shall not be put back at once for a new one.
        running = len(self.prefilling) + len(self.decoding) if self.admission == "optimistic" else 0
        needed = total + of_follower * len(sequence.followers) + running
        if needed - min(len(sequence.keys) + 1, self.pool.num_held) > self.pool.num_available:
            return False  # whatever might be found: so a long prompt's keys are not looked up in vain in every step
        shared = self._find_prefix(sequence)
        tail = self._find_tail(sequence, len(shared))
        found = shared if tail is None else [*shared, tail]
        needed -= len(found)
        if needed > self.pool.num_available - sum(map(self.pool.is_idle, found)):
            return False

        for page in found:
            self.pool.share(page)
        if tail is not None:
            self.pool.forget(tail)  # it is written to from now on
        self.pool.reserve(needed - running)
        sequence.reserved = total - len(found)
        sequence.pages = found
        sequence.registered = len(shared)
        sequence.computed = len(shared) * self.page_size
        if tail is not None and sequence.tail is not None:
            sequence.computed += sequence.tail.tokens
        sequence.cached = sequence.computed if sequence.cached is None else sequence.cached
        sequence.findable = 0  # it is found
        self._look_ahead(sequence)
        sequence.slot = self._slots.pop()
        sequence.to(State.PREFILLING)
        bisect.insort(self.prefilling, sequence, key=_arrival)
        for follower in sequence.followers:
            follower.slot, follower.reserved = self._slots.pop(), of_follower
        if found:
            batch.tables.append(TableRun(sequence.slot, 0, list(found)))
        batch.admitted.append(sequence)
        return True

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """The pages of its longest prefix that is in the cache; at least one token is left to compute."""
        pages: list[int] = []
        if sequence.may_share:
            for key in sequence.keys[: (sequence.length - 1) // self.page_size]:
                page = self.pool.find(key)
                if page is None:
                    break
                pages.append(page)
        return pages

    def _find_tail(self, sequence: Sequence, num_full: int) -> int | None:
        """The partial page of its session, if all pages before it were found. Nobody holds it: who does, hides it."""
        tail = sequence.tail
        if (
            tail is None
            or not sequence.may_share
            or num_full != tail.number
            or num_full * self.page_size + tail.tokens >= sequence.length
        ):
            return None
        return self.pool.find(tail.key)

    # Memory.

    def _make_room(self, sequence: Sequence) -> bool:
        """See to it that a decode can have a page; False if it was itself put back for that.

        Nobody who comes before it: the first decode of the highest priority always goes on.
        """
        while sequence.reserved == 0 and self.pool.num_available == 0:
            victim = max((*self.prefilling, *self.decoding), key=_dispensable)
            self._put_back(victim)
            if victim is sequence:
                return False
        return True

    def _put_back(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        sequence.preemptions += 1
        sequence.recomputed += sequence.computed
        self._remove(sequence)
        self._look_ahead(sequence)
        sequence.to(State.WAITING)
        bisect.insort(self.waiting, sequence, key=_arrival)

    def _remove(self, sequence: Sequence) -> None:
        """Take its slot, pages and promises from a running sequence."""
        (self.decoding if sequence.state is State.DECODING else self.prefilling).remove(sequence)
        for holder in (sequence, *sequence.followers):
            assert holder.slot is not None
            self._slots.append(holder.slot)
            self.pool.unreserve(holder.reserved)
            holder.slot, holder.reserved = None, 0
        self.pool.release(sequence.pages)
        sequence.pages, sequence.registered, sequence.computed = [], 0, 0

    def _register(self, sequence: Sequence) -> None:
        """Offer full pages, whose tokens are known and planned to be computed, for sharing."""
        full = min(len(sequence.keys), sequence.computed // self.page_size)
        for i in range(sequence.registered, full):
            self.pool.register(sequence.pages[i], sequence.keys[i])
        sequence.registered = max(sequence.registered, full)

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _shared_by_followers(self, prompt_length: int) -> int:
        """Full pages of a prompt that come before the page of its last token."""
        return (prompt_length - 1) // self.page_size


def _arrival(sequence: Sequence) -> int:
    return sequence.order


def _dispensable(sequence: Sequence) -> tuple[bool, int, int]:
    """Prompts that are half read rather than decodes, the least priority, then who came last."""
    return sequence.state is State.PREFILLING, -sequence.priority, sequence.order
