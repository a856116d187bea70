"""The rows that are sharded over context ranks, the exchange they take, and the sizes that steps are compiled for."""

import functools
from collections.abc import Sequence as List
from typing import NamedTuple

from longctx.parallel.cost import Thresholds
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.runtime import ExchangeCost, Predictor
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.batch import Chunk, keys_by_rank, place_rows, work_by_exchange, work_by_rank
from longctx.serving.scheduler.batch import Exchange as Exchange
from longctx.serving.scheduler.sequence import Sequence

Rows = tuple[int, int, int]
"""Numbers of sharded, replicated and local rows of a rank."""

_RINGS = ("pass_kv", "all_gather")  # exchanges in which keys travel


def allows_kv_exchange(plan: ParallelPlan, buckets: List[int], sharded: int, *others: int) -> bool:
    """Return whether a step with these rows of each kind is compiled for other exchanges than pass-Q.

    Where pages interleave, every step is compiled for the exchanges that the paper's rules choose from, and for those
    of `"auto"` if it has few replicated rows. Where sequences grow, there are many more combinations of rows: there a
    step is, if it is full of sharded rows and has few others.

    Args:
      buckets: of sharded rows, ascending; the last is the most that a step has.
    """
    if plan.placement == "interleave":
        return plan.exchange != "auto" or max(others, default=0) <= buckets[0]
    return is_full(buckets, sharded, *others)


def is_full(buckets: List[int], sharded: int, *others: int) -> bool:
    """Whether a step is full of sharded rows, by their buckets, and has few others."""
    return sharded > max(buckets[:-1], default=0) and max(others, default=0) <= buckets[0]


class RowBuckets(NamedTuple):
    """Buckets of each kind of rows, ascending."""

    plan: ParallelPlan
    kinds: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    @property
    def largest(self) -> Rows:
        """The largest bucket of each kind of rows."""
        sharded, replicated, local = map(max, self.kinds)
        return sharded, replicated, local

    def round_up(self, rows: Rows) -> Rows:
        """Return the smallest buckets that hold these rows; for no row at all, those of one row."""
        if not any(rows):
            kind = max(number for number, buckets in enumerate(self.kinds) if any(buckets))
            rows = int(kind == 0), int(kind == 1), int(kind == 2)
        sharded, replicated, local = (
            next(bucket for bucket in kind if bucket >= count) for kind, count in zip(self.kinds, rows, strict=True)
        )
        return sharded, replicated, local

    def exchanges(self, rows: Rows) -> tuple[str, ...]:
        """The exchanges that steps of such buckets are compiled for.

        They are the one that the plan names, and pass-Q; see `allows_kv_exchange` for those that a rule may choose.
        """
        sharded, *others = rows
        named = str(self.plan.exchange)
        if not sharded:
            return ("pass_q",)
        if named in _RINGS:
            return (named, "pass_q") if self.plan.placement == "interleave" else (named,)
        if named == "pass_q" or not allows_kv_exchange(self.plan, self.kinds[0][1:], sharded, *others):
            return ("pass_q",)
        return ("pass_q", "pass_kv", "all_gather") if named == "auto" else ("pass_q", "pass_kv")


SHARDED = ("pass_kv", "all_gather", "pass_q")
"""Exchanges of sharded rows; the first of equals is taken, so that no query travels where nothing is cached."""


class ExchangeRule:
    """Decides by the plan's `exchange`; the same arguments give the same answer.

    `"auto"` compares predicted seconds: of a prompt's chunk with its rows replicated and with its rows sharded, which
    have a share of the linear layers each; and of sharded rows with each exchange, for the whole step. All other rules
    shard the rows of prompts longer than a step, and of all where pages interleave. Single rows, of decodes and of
    prompts' last tokens, are not asked about: where they are sharded they go by pass-Q, as in algorithm 4, and beside
    chunks whose keys travel they are replicated.

    Args:
      rows: of a step, at most.
      page_size: tokens of a page.
      costs: a predictor that knows exchanges; None: `"auto"` has nothing to compare.
      link: what the equations of algorithms 1 and 5 go by.
      known: the exchanges of sharded rows that `costs` knows.
      buckets: numbers of sharded rows that steps are compiled for, ascending; empty: all steps have all exchanges.
      window: tokens that a query of a sliding layer sees, itself included; 0: no layer is sliding.

    Raises:
      ValueError: the plan's rule needs a link.

    Source: context parallelism paper, 3.4, algorithms 1, 4 and 5, appendix D; KVP, Mnemosyne 4.4.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        rows: int,
        page_size: int = 1,
        costs: Predictor | None = None,
        link: ExchangeCost | None = None,
        known: List[str] = SHARDED,
        buckets: List[int] = (),
        window: int = 0,
    ) -> None:
        self.window = window
        self._plan, self._rows, self._page_size, self._buckets = plan, rows, page_size, buckets
        self._costs, self._link, self._known, self._empirical = costs, link, known, plan.empirical_rule
        if plan.context > 1 and plan.exchange in ("algorithm_1", "algorithm_5") and link is None:
            raise ValueError(f"exchange={plan.exchange!r} needs a topology, or a predictor that knows exchanges")
        self._is_predicted = plan.exchange == "auto" and costs is not None
        self._compare = functools.lru_cache(1024)(self._seconds_per_token)

    @property
    def rank_window(self) -> int:
        """Tokens of the window of a query whose sequence is on several ranks, on that which has most of them."""
        return -(-self.window // self._plan.context) if self._plan.placement == "interleave" else self.window

    def shards_decodes(self, count: int = 1, beside: Sequence | None = None) -> bool:
        """Whether a step is planned with sharded rows of decodes, which `place_single_rows` decides when it is full.

        All sharded rows of a step take one exchange, and decodes can't take pass-KV. So beside a prompt whose keys
        travel, they are replicated.

        Args:
          count: of decodes in the step.
          beside: the prompt that takes most of it.
        """
        if not self._plan.shards_rows or self._plan.placement != "interleave":
            return False
        if beside is None or not self.shards_next(beside):
            return True
        ranks, start = self._plan.context, beside.computed
        tokens = min(beside.remaining, ranks * (self._rows - count))
        if tokens < 1:
            return True
        if not self._is_predicted:
            return self._by_rule(tokens, start, -(-tokens // ranks), count)[0] == "pass_q"
        assert self._costs is not None
        fullest, seconds = max(keys_by_rank(beside, start, self._page_size)), {}
        for name in self._offered(-(-tokens // ranks), count):
            work, rows = self._sharded(start, tokens, fullest, name), -(-count // ranks)
            if name == "pass_q":
                work = work._replace(rows=work.rows + rows, sharded=work.sharded + rows)
            else:
                work = work._replace(rows=work.rows + count, replicated=count)
            seconds[name] = self._costs.seconds(work)
        return min(seconds, key=seconds.__getitem__) == "pass_q"

    def shards(self, start: int, stop: int, keys: List[int] | None = None) -> bool:
        """Whether the next rows of a prompt are sharded.

        Args:
          start, stop: positions of the tokens that are to be computed, at least one.
          keys: how many of the tokens before them each rank has; None: they are not placed yet.
        """
        plan, count = self._plan, stop - start
        if not plan.shards_rows:
            return False
        spans = plan.placement == "interleave" or (keys is not None and sum(map(bool, keys)) > 1)
        if count <= self._rows and not spans:
            return False  # beside it, other ranks compute rows of others
        if not self._is_predicted:
            return plan.placement == "interleave" or count > self._rows
        fullest = max(keys) if keys else -(-start // plan.context)
        alone, sharded = self._compare(start, min(count, plan.context * self._rows), fullest, spans)
        return sharded < alone

    def shards_next(self, sequence: Sequence) -> bool:
        """Whether the next rows of a prompt that has its place are sharded."""
        if not self._plan.shards_rows:
            return False
        start = sequence.computed
        few = sequence.remaining <= self._rows and len(sequence.ranks) <= 1
        keys = None if few or sequence.placement is None else keys_by_rank(sequence, start, self._page_size)
        return self.shards(start, start + sequence.remaining, keys)

    def exchanges(self, tokens: int, cached: int, *others: int) -> List[str]:
        """Return the exchanges of which sharded rows take the fastest, for `tokens` new tokens after `cached` ones.

        Args:
          others: rows of the other kinds in the step.
        """
        if tokens == 1:
            return ("pass_q",)
        rows = -(-tokens // self._plan.context)
        return (
            self._offered(rows, *others) if self._is_predicted else (self._by_rule(tokens, cached, rows, *others)[0],)
        )

    def place_single_rows(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks of a step, of which those of one token are sharded if longer ones leave them pass-Q.

        Else they are replicated, so that they change no other chunk's exchange.
        """
        if not self.shards_decodes() or all(chunk.num_tokens > 1 for chunk in chunks):
            return chunks
        replicated = [c._replace(sharded=False) if c.num_tokens == 1 and c.sharded else c for c in chunks]
        exchange, _ = self.choose(replicated) if any(c.sharded for c in replicated) else (None, ())
        if exchange is not None and exchange.name != "pass_q":
            return replicated
        return [c._replace(sharded=True) if c.num_tokens == 1 and not c.sharded else c for c in chunks]

    def has_room(self, chunks: List[Chunk]) -> bool:
        """Whether a step has as many rows of each kind as chunks need."""
        return sum(count_rows(chunks, self._plan.context)) <= self._rows

    def choose(self, chunks: List[Chunk]) -> tuple[Exchange | None, list[Work]]:
        """Return the exchange of a step's rows, None for none, and the work of each rank with it."""
        ranks = self._plan.context
        sharded = [chunk for chunk in chunks if chunk.sharded] if ranks > 1 else []
        if not sharded:
            works = work_by_rank(chunks, ranks, self._page_size, window=self.window)
            return self._replicated(chunks) if ranks > 1 else None, works
        long = [chunk for chunk in sharded if chunk.num_tokens > 1]
        if len(long) < len(sharded):
            name, reason = "pass_q", "algorithm 4: single rows alone"
            if long and not self._is_predicted:
                _, reason = self._by_rule(*_sums(long), *count_rows(chunks, ranks))
            elif long:
                reason = "predicted, and algorithm 4 for single rows"
        elif self._is_predicted:
            return self._fastest(chunks, sharded)
        else:
            name, reason = self._by_rule(*_sums(sharded), *count_rows(chunks, ranks))
        exchange = Exchange(name, f"{reason}, {_size(long or sharded)}")
        return exchange, work_by_rank(chunks, ranks, self._page_size, name, self.window)

    def _by_rule(self, tokens: int, cached: int, *rows: int) -> tuple[str, str]:
        """The exchange of new tokens after cached ones without prediction, and why; `rows` as in `_offered`."""
        rule = str(self._plan.exchange)
        if rule in self._known:
            return rule, "set by the plan"
        if "pass_kv" not in self._offered(*rows):
            return "pass_q", f"{rule}: too few sharded rows, or too many others"
        if rule == "auto":
            return "pass_kv", "nothing to predict from"
        if self._empirical is not None:
            h = self._empirical.h(tokens, cached)
            return "pass_kv" if h > 0 else "pass_q", f"empirical: h = {h:.3f}"
        assert self._link is not None
        eq = Thresholds.of(tokens, self._plan.context, self._link.model, self._link.hardware)
        least = eq.equation_1 if rule == "algorithm_1" else eq.equation_5
        passes_kv = tokens >= eq.equation_2 or tokens / (tokens + cached) >= least
        reason = f"{rule}: pass_kv from T = {eq.equation_2:,.0f} or a miss rate of {least:.2%} on"
        return "pass_kv" if passes_kv else "pass_q", reason

    def _fastest(self, chunks: List[Chunk], sharded: List[Chunk]) -> tuple[Exchange, list[Work]]:
        """The exchange with which the step's slowest rank takes least."""
        assert self._costs is not None
        counts = count_rows(chunks, self._plan.context)
        works = work_by_exchange(chunks, self._plan.context, self._page_size, self._offered(*counts), self.window)
        seconds = {name: max(map(self._costs.seconds, each)) for name, each in works.items()}
        name = min(seconds, key=seconds.__getitem__)
        predicted = ", ".join(f"{each} {_milliseconds(seconds[each])}" for each in seconds)
        return Exchange(name, f"predicted: {predicted}, {_size(sharded)}"), works[name]

    def _offered(self, sharded: int, *others: int) -> List[str]:
        """Return the exchanges a rule may choose from, given the rows of each kind on the fullest rank."""
        if self._buckets and not allows_kv_exchange(self._plan, self._buckets, sharded, *others):
            return ["pass_q"]
        return self._known

    def _replicated(self, chunks: List[Chunk]) -> Exchange | None:
        """For a step without sharded rows."""
        several = [chunk for chunk in chunks if len(chunk.ranks) > 1]
        prompts = [chunk for chunk in several if not chunk.decodes]
        if not prompts:
            return Exchange("kvp", "decodes alone") if several else None
        if not self._is_predicted:
            reason = "set by the plan" if self._plan.exchange == "kvp" else "no longer than a step"
            return Exchange("kvp", f"{reason}, {_size(prompts)}")
        first = prompts[0]
        keys = keys_by_rank(first.sequence, first.start, self._page_size)
        alone, sharded = (
            each * first.num_tokens for each in self._compare(first.start, first.num_tokens, max(keys), True)
        )
        predicted = f"kvp {_milliseconds(alone)}, sharded {_milliseconds(sharded)}"
        return Exchange("kvp", f"predicted: {predicted}, {_size(prompts)}")

    def _seconds_per_token(self, start: int, count: int, fullest: int, spans: bool) -> tuple[float, float]:
        """Seconds of each token of the largest chunk that a step takes: of its sequence's ranks alone, and sharded.

        Args:
          fullest: cached keys of the rank that has most of them.
          spans: whether several ranks have keys of the sequence; else one computes its chunk.
        """
        assert self._costs is not None
        ranks, alone = self._plan.context, min(count, self._rows)
        window = self.rank_window if spans else None
        here = Work(window=self.window).with_chunk(fullest if spans else start, alone, False, spans, window)
        total = alone * start + alone * (alone + 1) // 2
        here = here._replace(elsewhere=max(0, total - here.pairs))
        names = self._offered(-(-count // ranks))
        sharded = min(self._costs.seconds(self._sharded(start, count, fullest, name)) for name in names)
        return self._costs.seconds(here) / alone, sharded / count

    def _sharded(self, start: int, count: int, fullest: int, exchange: str) -> Work:
        """A rank's share of a chunk, alone in a step."""
        ranks = self._plan.context
        share = Work(window=self.window).with_sharded(start, count, ranks, fullest, exchange=exchange)
        return share._replace(elsewhere=(ranks - 1) * share.pairs)


def count_rows(chunks: List[Chunk], num_ranks: int) -> tuple[int, int, int]:
    """Rows of each kind on the rank that has most: sharded, replicated, local."""
    sharded, replicated, local = 0, [0] * num_ranks, [0] * num_ranks
    for chunk in chunks:
        if chunk.sharded:
            sharded += chunk.num_tokens
        else:
            place_rows(replicated if len(chunk.ranks) > 1 else local, chunk.ranks, chunk.num_tokens)
    return -(-sharded // num_ranks), max(replicated), max(local)


def _sums(chunks: List[Chunk]) -> tuple[int, int]:
    """New and cached tokens: sequences that are packed send the sum of what is cached of them."""
    return sum(chunk.num_tokens for chunk in chunks), sum(chunk.start for chunk in chunks)


def _size(chunks: List[Chunk]) -> str:
    tokens, cached = _sums(chunks)
    return f"T = {tokens:,}, P = {cached:,}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
