"""Instances of a simulated cluster, and their cores, which serve parts of requests: prompts for others, or answers."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.costs import PredictorCosts
from longctx.cluster.conductor.instance import Report
from longctx.cluster.prefix_index.index import Tier
from longctx.models.footprint import cache_bytes
from longctx.serving.kv_cache.connector import TIERS, Loaded, PageLoad
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.predictor.correction import Corrected
from longctx.serving.request.output import Metrics
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.serving.scheduler.sequence import Sequence, completion_of
from longctx.simulation.cluster.cluster_instance import ClusterInstance
from longctx.simulation.cluster.settings import ClusterSettings
from longctx.simulation.event_loop import EventLoop, Link, Thread
from longctx.simulation.instance.instance import Instance
from longctx.simulation.instance.tokenless import TokenlessCompletion, make_sequence
from longctx.simulation.instance.virtual_executor import Pending, has_prompts
from longctx.simulation.workloads import WorkloadRequest

_KEY_BYTES = 8  # of a page's key, by which the conductor and KV events know it
_TAIL = b"tail"  # stands for the key of a last, partial page


class SubRequestListener:
    """Receiver of what happens to a sub-request, at `loop.now`."""

    def chunk_begins(self, sub: "SubRequest", start: int, tokens: int) -> None:
        """Note that `tokens` tokens of its prompt are computed from now on; those before `start` are there."""

    def chunk_ends(self, sub: "SubRequest", start: int, tokens: int) -> None:
        """Note that they have been computed."""

    def first_token(self, sub: "SubRequest") -> None:
        """Note that its prompt has been read, and its first token drawn, which is not its last."""

    def ended(self, sub: "SubRequest", part: TokenlessCompletion) -> None:
        """Note that it has all its tokens."""

    def prefix_came(self, source: str, num_bytes: float, begun: float) -> None:
        """Note that pages of its prefix have come from another instance."""


@dataclass(eq=False)
class SubRequest:
    """The part of a request that one core serves.

    Attributes:
      request_id: no other sub-request of a core has it.
      arrival: of the request.
      known: tokens of its output that are known, and belong to the prompt here.
      max_tokens: that are generated here.
      came: leading tokens whose keys and values are in the host's memory, for this sub-request alone.
      staged: leading tokens, of full pages, that are there, and what follows them is computed here.
      source: another core that has leading pages, of `prefix` tokens, which are fetched from there; None: nothing is.
      part: the request's prompt, its answer after another one has read the prompt, or both.
    """

    request: WorkloadRequest
    request_id: str
    arrival: float
    listener: SubRequestListener
    known: int
    max_tokens: int
    came: int = 0
    staged: int = 0
    source: "ClusterCore | None" = None
    prefix: int = 0
    part: Literal["prompt", "answer", "whole"] = "whole"


class ClusterCore(Instance):
    """One life of an instance of a cluster, from when it joins until it dies.

    Args:
      seed: of keys of pages that no trace names.
      core: that it shares; None: its devices are its own.
      on_tokens: is called with the number of tokens of each step of decodes; None: nothing comes of them.

    Attributes:
      spec: what it was made of.
      nic: over which all leaves that others get.
      server: the thread that deals with requests beside the engine.
      is_dead: nothing that it has can be had any more.
    """

    def __init__(
        self,
        spec: ClusterInstance,
        loop: EventLoop,
        seed: int,
        keep_steps: bool = False,
        core: Link | None = None,
        on_tokens: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__(
            spec.model,
            spec.config,
            spec.predictor,
            spec.plan,
            topology=spec.topology,
            name=spec.name,
            host=spec.host,
            host_bandwidth=spec.host_bandwidth,
        )
        self.executor.notes_prompts = True
        self.keep_steps, self.is_dead = keep_steps, False
        self.page_bytes = spec.config.page_size * cache_bytes(spec.model, 1, kv_dtype=spec.config.kv_dtype)
        self.attach(loop, lambda request, metrics: None, seed)
        self.nic = Link(loop, spec.bandwidth, spec.latency)
        self.spec, self._on_tokens = spec, on_tokens
        self.server = Thread([Link(loop, 1.0) if core is None else core])
        if core is not None:
            self.executor.share_cores(loop, Thread([core]), self._end_ready)
        if core is not None or on_tokens is not None:
            self._finder = None  # all steps are events
        self._subs: dict[str, tuple[SubRequest, Sequence]] = {}
        self._of_source: dict[str, SubRequest] = {}  # whose pages come from beyond its own tier

    def listen(self, on_change: Callable[[str, List[Key], List[Key]], object]) -> None:
        """Tell of pages that can be found from now on, and of those that can't any more, by tier."""
        self._on_change = on_change
        if self.config.prefix_cache:
            self._core.pool.listener = self
        if self._tier is not None:
            self._tier.listener = lambda new, gone: on_change("host", new, gone)

    def stored(self, parent: Key | None, keys: list[Key], tokens: object, salt: str) -> None:
        self._on_change("device", keys, [])

    def removed(self, key: Key) -> None:
        self._on_change("device", [], [key])

    def cleared(self) -> None:
        """Nothing: each page was told of."""

    def serve(self, sub: SubRequest) -> None:
        """Let a sub-request come at `loop.now`."""
        self._settle()
        is_whole = not sub.came  # its pages are those of the prompt, which others may share
        sequence = make_sequence(
            sub.request,
            sub.request_id,
            self._sequence_maker.next_order(),
            sub.arrival,
            self.config.page_size,
            self._seed,
            self.config.prefix_cache and is_whole,
            sub.known,
            sub.max_tokens,
        )
        _tokenless(sequence).times = []
        if not sequence.keys:
            sub.source = None  # it can't know pages of prefixes
        if sub.came or sub.staged or sub.source is not None:
            sequence.source = sub.request_id
            self._of_source[sub.request_id] = sub
        if sub.came or sub.staged:
            sequence.tail_key = _TAIL
        self._subs[sub.request_id] = sub, sequence
        self._join(sub.request, sequence)

    def cancel(self, request_id: str) -> TokenlessCompletion:
        """End a sub-request wherever it is, and return what it came to."""
        self._settle()
        _, sequence = self._subs.pop(request_id)
        self._of_source.pop(request_id, None)
        del self._open[request_id]
        if sequence in self._entering:
            self._entering.remove(sequence)
        else:
            self._core.cancel(sequence)
            self._wake()
        return _tokenless(sequence)

    def kill(self) -> None:
        """Nothing it has can be had any more."""
        self.is_dead = True
        self._core.pool.listener = None
        if self._tier is not None:
            self._tier.listener = None

    def count_held(self, keys: List[Key]) -> int:
        """Count the leading pages that it has, on its devices or in its host's memory."""
        if self.is_dead:
            return 0
        pool, tier = self._core.pool, self._tier
        missing = (i for i, key in enumerate(keys) if pool.find(key) is None and (tier is None or key not in tier))
        return next(missing, len(keys))

    def costs(self) -> PredictorCosts | None:
        """Return the costs of its work as its engine has corrected them; None: it has had nothing to correct."""
        predictor = self._core.scheduler.chunker.predictor
        if not isinstance(predictor, Corrected) or predictor.is_confirmed:
            return None
        return dataclasses.replace(self.spec.costs, predictor=copy.copy(predictor))

    def discard(self, keys: List[Key]) -> None:
        """Remove pages from the host's memory."""
        if self._tier is not None:
            self._tier.discard(keys)

    def decodes(self) -> tuple[int, int]:
        """Count sub-requests whose prompts have been read, here or elsewhere, and all tokens of their contexts."""
        done = 0 if self._repeated is None else self._repeated.periods_until(self._loop.now)
        count = tokens = 0
        for sub, sequence in self._subs.values():
            if sub.part == "answer" or sequence.length > sequence.prompt_length:
                count += 1
                tokens += sequence.length + (done if sequence.is_running else 0)
        return count, tokens

    @property
    def queue_seconds(self) -> float:
        """Predicted seconds of all prompts that it has not computed, and of those in the step that runs."""
        running = sum(1 for batch in self._core.in_flight if has_prompts(batch))
        rest = max(0.0, self.executor.free - self._loop.now) if running else 0.0
        return max(0.0, self.prefill_seconds) + rest

    @property
    def known(self) -> frozenset[str]:
        """Ids of its sub-requests."""
        return frozenset(self._subs)

    def _enter(self) -> None:
        for sequence in self._entering:
            sub, found = self._of_source.get(completion_of(sequence).request_id), 0
            if self._tier is not None and (sub is None or not sub.came):
                self._core.look_up([sequence], self._tier)
                found = sequence.available
            if sub is not None:
                there = sub.came or sub.staged or sub.prefix
                if found < there:
                    sequence.available = there
                else:  # it has them itself by now
                    sequence.source, sequence.tail_key = TIERS, None
            self._core.add([sequence])
        self._entering.clear()

    def _begin_moves(self, batch: Batch) -> None:
        if self._tier is not None and batch.stores:
            self._tier.put(store.key for store in batch.stores)
        for load in batch.loads:
            self._begin_load(load)
        if has_prompts(batch):
            for sub, chunk in self._prompts(batch):
                sub.listener.chunk_begins(sub, chunk.start, chunk.num_tokens)

    def _begin_load(self, load: PageLoad) -> None:
        sub, loop = self._of_source.get(load.source), self._loop
        if sub is None:
            assert self._tier is not None
            self._tier.load(load, loop, self._link, self._end_load)
            return
        begun = loop.now
        if sub.came or sub.staged:
            done = Loaded(load.name, len(load.pages), 0.0)
            pages = sub.came / self.config.page_size if sub.came else len(load.pages)
            self._link.send(pages * self.page_bytes, lambda: self._end_load(done))
            return
        source, keys = sub.source, load.keys
        assert source is not None
        own = 0 if self._tier is None else self._tier.look_up(keys)
        if self._tier is not None:
            self._tier.put(keys[:own])
        there = source.count_held(keys[own:])

        def end_prefix() -> None:
            if there and not source.is_dead:
                sub.listener.prefix_came(source.name, there * self.page_bytes, begun)
            found = own + (0 if source.is_dead else there)
            self._end_load(Loaded(load.name, found, loop.now - begun))

        # What it has itself comes while the rest is on its way: whichever is later ends the load.
        waits = [None, None]

        def end_part() -> None:
            waits.pop()
            if not waits:
                end_prefix()

        self._link.send(own * self.page_bytes, end_part)
        source.nic.send(there * self.page_bytes, end_part)

    def _end_ready(self, pending: Pending) -> None:
        """A batch has left the stages, which computes nothing if it is not the oldest in flight."""
        if self._queue and self._queue.oldest is pending:
            self._end()

    def _note_results(self, batch: Batch) -> None:
        if self._on_tokens is not None and (count := sum(1 for chunk in batch.chunks if chunk.decodes)):
            self.server.run(count * self.spec.server.token)
            self._on_tokens(count)
        if not has_prompts(batch):
            return
        for sub, chunk in self._prompts(batch):
            sub.listener.chunk_ends(sub, chunk.start, chunk.num_tokens)
            if chunk.samples and sub.max_tokens > 1:
                sub.listener.first_token(sub)

    def _prompts(self, batch: Batch) -> list[tuple[SubRequest, Chunk]]:
        """Return the chunks of prompts that are read here with their sub-requests, unless these were cancelled."""
        found = []
        for chunk in reversed(batch.chunks):
            if chunk.decodes:
                break
            entry = self._subs.get(completion_of(chunk.sequence).request_id)
            if entry is not None and entry[1] is chunk.sequence and not entry[0].came:
                found.append((entry[0], chunk))
        return found

    def _end_request(self, request_id: str, metrics: Metrics) -> None:
        super()._end_request(request_id, metrics)
        sub, sequence = self._subs.pop(request_id)
        self._of_source.pop(request_id, None)
        sub.listener.ended(sub, _tokenless(sequence))


def _tokenless(sequence: Sequence) -> TokenlessCompletion:
    completion = sequence.completion
    assert isinstance(completion, TokenlessCompletion)
    return completion


def block_keys(keys: List[Key]) -> np.ndarray:
    """Return the keys by which the conductor knows pages, uint64 `[pages]`."""
    return np.frombuffer(b"".join([key[:_KEY_BYTES] for key in keys]), ">u8").astype(np.uint64)


class Node:
    """An instance: a core while it lives, and what it tells of its cache.

    Args:
      keep_steps: whether cores keep their steps.
      cores: of processors that instances share, by name.
      router: the router's thread.

    Attributes:
      core: of its present life; None: it is dead.
      lives: all its cores.
    """

    def __init__(
        self,
        spec: ClusterInstance,
        conductor: Conductor,
        loop: EventLoop,
        seed: int,
        settings: ClusterSettings,
        keep_steps: bool,
        cores: Mapping[str, Link],
        router: Thread,
    ) -> None:
        self.spec, self.role, self.core = spec, spec.role, cast(ClusterCore | None, None)
        self.lives: list[ClusterCore] = []
        self._conductor, self._loop, self._seed = conductor, loop, seed
        self._settings, self._keep_steps = settings, keep_steps
        self._shared, self._router = cores.get(spec.core), router
        self._kept: dict[int, Key] = {}  # in the host's memory, by what the conductor knows them by, if it swaps

    def join(self) -> None:
        """Begin a life in its role, with an empty cache."""
        token = self._settings.router.token
        on_tokens = (lambda count: self._router.run(count * token)) if token or self.spec.server.token else None
        made = self.spec, self._loop, self._seed, self._keep_steps, self._shared, on_tokens
        self.core = core = ClusterCore(*made)
        self.lives.append(core)
        self._kept.clear()
        self._conductor.join(self.spec.spec(self.role, self._settings.swaps), self._loop.now)
        core.listen(lambda tier, new, gone: self._apply_change(core, cast(Tier, tier), new, gone))

    def swap_out(self, keys: np.ndarray) -> None:
        """Drop blocks, uint64 `[blocks]`, from the host's memory, as far as it has them."""
        if self.core is not None:
            self.core.discard([self._kept[key] for key in keys.tolist() if key in self._kept])

    def kill(self) -> None:
        """End its life; its sub-requests have been cancelled."""
        assert self.core is not None
        self.core.kill()
        self.core = None

    def report(self) -> None:
        """Tell the conductor what it has to do."""
        core = self.core
        if core is not None:
            count, tokens = core.decodes()
            report = Report(core.queue_seconds, count, tokens, core.known)
            self._conductor.report(self.spec.name, report, self._loop.now, core.costs())
            for thread, times in ((core.server, self.spec.server), (self._router, self._settings.router)):
                if times.report:
                    thread.run(times.report)

    def _apply_change(self, core: ClusterCore, tier: Tier, new: List[Key], gone: List[Key]) -> None:
        if self._settings.swaps and tier == "host":
            self._kept.update(zip(block_keys(new).tolist(), new, strict=True))
            for block in block_keys(gone).tolist():
                self._kept.pop(block, None)
        if self._settings.event_seconds:
            new, gone = list(new), list(gone)
            self._loop.at(self._loop.now + self._settings.event_seconds, lambda: self._tell(core, tier, new, gone))
        else:
            self._tell(core, tier, new, gone)

    def _tell(self, core: ClusterCore, tier: Tier, new: List[Key], gone: List[Key]) -> None:
        if core is not self.core:
            return  # it has died
        if new:
            self._conductor.index.store(self.spec.name, tier, block_keys(new).tolist())
        if gone:
            self._conductor.index.remove(self.spec.name, tier, block_keys(gone).tolist())
