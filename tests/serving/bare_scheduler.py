"""A scheduler without engine and devices: sequences, steps whose results come when they should, and exact checks."""

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable

from longctx.serving import EngineConfig, ParallelPlan, Slo
from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.kv_cache.window_pages import WindowPages, window_span
from longctx.serving.predictor import CurvePredictor
from longctx.serving.predictor.correction import Corrected
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.chunking import Chunker, Chunking
from longctx.serving.scheduler.policy import make_policy
from longctx.serving.scheduler.scheduler import Scheduler
from longctx.serving.scheduler.sequence import Sequence, State

# 1 ms whatever there is, 10,000 tokens a second besides, and attention.
DEVICE = CurvePredictor((1, 2), (0.0011, 0.0012), 1e-7, 1e-7, 1e-5)


class BareScheduler:
    """Plans steps; a token comes when its batch has left the last stage, and the clock moves by predicted seconds."""

    def __init__(
        self,
        plan: ParallelPlan,
        num_pages: int,
        page_size: int = 4,
        admission: str = "reserve",
        policy: str = "ilrs",
        chunking: str = "static",
        max_running: int = 6,
        token_budget: int = 16,
        slo: Slo | None = None,
        readable: Callable[[float], float] = lambda tpot: math.inf,
        window: int | None = None,
    ) -> None:
        chunker = Chunker(
            make_policy(policy, 0.5),
            Corrected(DEVICE),
            Chunking.parse(chunking, token_budget, max_running),
            plan,
            page_size,
            (8, token_budget) if token_budget > 8 else (token_budget,),
        )
        self.pool = PagePool(num_pages, plan.context)
        if window is not None:
            config = EngineConfig(page_size=page_size, max_running=max_running, token_budget=token_budget, run_ahead=1)
            length = num_pages * plan.context * page_size
            count, span = config.count_window_pages(window, plan, num_pages, length), window_span(window, page_size)
            self.pool.windows = WindowPages(count, num_pages, plan.context, span)
        placer = plan.placer(page_size, token_budget, lambda tpot: readable(tpot or math.inf))
        self.scheduler = Scheduler(chunker, self.pool, page_size, max_running, admission, slo or Slo(), placer)  # type: ignore[arg-type]
        self.now, self.page_size, self.plan = 0.0, page_size, plan
        self.is_optimistic = admission == "optimistic"
        self.sequences: list[Sequence] = []
        self.batches: list[Batch] = []
        self._stages: deque[Batch] = deque(maxlen=plan.stage)

    def add(self, prompt_length: int, max_tokens: int, document: str = "", **fields: object) -> Sequence:
        """Submit a prompt; those of one document begin alike."""
        order = len(self.sequences)
        sequence = Sequence(f"s{order}", order, prompt_length, max_tokens, self.now, **fields)  # type: ignore[arg-type]
        if document:
            sequence.keys = [f"{document} {i}".encode() for i in range(prompt_length // self.page_size)]
        self.scheduler.planner.check(prompt_length, max_tokens)
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        if sequence.state is not State.FINISHED:
            self.scheduler.finish(sequence)

    @property
    def has_work(self) -> bool:
        return any(sequence.state is not State.FINISHED for sequence in self.sequences)

    def step(self) -> Batch:
        batch = self.scheduler.schedule(self.now)
        if batch is None:
            batch = self.scheduler.idle()
        self.batches.append(batch)
        self.compute(batch)
        self._stages.append(batch)
        self.now += max(max(each.predicted for each in self._stages), 1e-4)
        if len(self._stages) == self.plan.stage:
            for sequence in self._stages[0].sampled:
                if sequence.state is not State.FINISHED:
                    self.scheduler.receive(sequence)
                    if sequence.length - sequence.in_flight == sequence.prompt_length + sequence.max_tokens:
                        self.scheduler.finish(sequence)
        return batch

    def compute(self, batch: Batch) -> None:
        """Compute a step that has just been planned, in tests that look at its rows."""

    def run(self, most_steps: int = 20_000) -> None:
        """To the end of all sequences; at most some idle steps in a row."""
        idle = 0
        while self.has_work:
            idle = 0 if self.step().chunks else idle + 1
            assert idle <= 2 * self.plan.stage, "nobody can go on"
            most_steps -= 1
            assert most_steps, "sequences do not end"

    def check(self) -> None:
        """Check counts and promises, and that all running sequences can end, by the pages that each really holds."""
        pool, running = self.pool, list(self.scheduler.running)
        holders = Counter(page for sequence in running for page in sequence.pages)
        alone = [[page for page in sequence.pages if holders[page] == 1] for sequence in running]
        assert pool.num_alone == sum(map(len, alone))
        for sequence, pages in zip(running, alone, strict=True):
            assert pool.alone(sequence.order) == [
                sum(pool.rank_of(page) == rank for page in pages) for rank in range(pool.num_ranks)
            ]
            assert sequence.claim >= 0
            assert sequence.promised >= 0
            if sequence.claim or sequence.promised or sequence.state is State.PREFILLING:
                known = len(sequence.pages) + sum(sequence.reserved) + sequence.claim + sequence.promised
                assert known == self.scheduler.planner.total_pages(sequence)
            assert not (self.is_optimistic and sequence.promised)
        assert pool.promised == sum(sequence.promised for sequence in running)
        assert pool.reserved == [sum(s.reserved[rank] for s in running) for rank in range(pool.num_ranks)]
        assert min(pool.by_rank) >= 0
        assert pool.num_available >= 0
        assert self.can_all_end()

    def can_all_end(self) -> bool:
        """Whether there is an order in which running sequences get what they need: whoever can end, ends."""
        left = list(self.scheduler.running)
        free = self.pool.num_available
        while left:
            ready = [s for s in left if s.claim <= free or (self.is_optimistic and s.state is State.DECODING)]
            if not ready:
                return False
            others = Counter(page for s in left if s not in ready for page in s.pages)
            freed = {page for s in ready for page in s.pages if not others[page]}
            free += len(freed) + sum(sum(s.reserved) + s.promised for s in ready)
            left = [s for s in left if s not in ready]
        return True

    def check_empty(self) -> None:
        assert self.pool.num_held == self.pool.num_reserved == self.pool.num_alone == 0
        assert self.pool.num_available == self.pool.num_pages


def ranks_over_time(run: BareScheduler, sequence: Sequence) -> list[tuple[int, ...]]:
    """The ranks that compute a sequence, in the order of its chunks, without repetitions."""
    chunks = [chunk.ranks for batch in run.batches for chunk in batch.chunks if chunk.sequence is sequence]
    return [ranks for ranks, _ in itertools.groupby(chunks)]
