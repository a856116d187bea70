"""Predictors of the seconds of a batch, and the one over data sheets and tables of operators.

Source: Mnemosyne, section 4.2, and Medha, section 4.1, which both use Vidur's predictor.
"""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from longctx.parallel.cost import Hardware, LayerCost, ModelShape
from longctx.serving.predictor.attention import (
    NO_KERNEL,
    KernelSeconds,
    SlidingCost,
    pairs_and_keys,
    shorter,
    shorter_of_steps,
)
from longctx.serving.predictor.work import Work

_REMEMBERED = 2**16  # numbers of rows


@runtime_checkable
class Predictor(Protocol):
    """Predicts the time of batches; both methods are pure functions.

    Source:
      Vidur and Medha, 4.2: a scheduler that knows how long a batch will take.

    Examples:
      >>> from longctx.serving.predictor import Predictor, Work
      >>> class PerToken:
      ...     def seconds(self, work: Work) -> float:
      ...         return 1e-3 * work.rows
      ...     def prefill_seconds(self, start: int, stop: int, chunk: int) -> float:
      ...         return 1e-3 * (stop - start)
      >>> mine: Predictor = PerToken()  # what `Engine`, or `longctx.simulation.Instance`, is given
      >>> mine.seconds(Work.of([(0, 512, True), (100, 1, True)]))
      0.513
    """

    def seconds(self, work: Work) -> float:
        """Seconds of a batch; 0 for an empty one."""

    def prefill_seconds(self, start: int, stop: int, chunk: int) -> float:
        """Seconds of prefilling a prompt's tokens from `start` to `stop` alone, in chunks of `chunk` tokens."""


def curves_of(predictor: Predictor) -> Callable[[Work, int], Callable[[int], float]]:
    """Return what gives the seconds of a batch with one more local chunk, as a function of the chunk's tokens.

    It is called with the batch's work and the tokens before the chunk. A step's chunks are found by asking for many
    sizes, so a predictor may have a quicker `chunk_curve` of its own, which gives the same numbers as `seconds` does.
    No token is sampled after the chunk.
    """
    own: Callable[[Work, int], Callable[[int], float]] | None = getattr(predictor, "chunk_curve", None)
    if own is not None:
        return own
    return lambda work, start: lambda count: predictor.seconds(work.with_chunk(start, count, False))


def window_of(predictor: Predictor) -> int:
    """Tokens of the sliding window that a predictor counts, for `Work.window`; 0: none."""
    return getattr(predictor, "window", 0)


def seconds_of_many(predictor: Predictor, works: Work, count: int) -> np.ndarray:
    """Return the seconds of many batches that differ in numbers of keys and pairs, and in where their chunks start.

    Args:
      works: of the batches: fields that differ are int64 `[count]`, and so is the start of a chunk.
      count: of batches.

    Returns:
      float64 `[count]`, each equal to what `predictor.seconds` gives for the batch alone.
    """
    if not works.rows:
        return np.zeros(count)
    differ = [name for name, value in zip(works._fields, works, strict=True) if isinstance(value, np.ndarray)]

    def one(number: int) -> float:
        chunks = tuple([(_item(start, number), tokens) for start, tokens in works.chunks])
        own: dict[str, Any] = {name: int(getattr(works, name)[number]) for name in differ}
        return predictor.seconds(works._replace(chunks=chunks, **own))

    # Most predictors are arithmetic, which arrays do as well; any other is asked for each batch.
    try:
        found: Any = predictor.seconds(works)
    except (TypeError, ValueError):
        found = None
    is_alike = isinstance(found, np.ndarray) and found.shape == (count,)
    if is_alike and all(found[number] == one(number) for number in (0, count - 1)):
        return found
    return np.array([one(number) for number in range(count)])


def _item(value: Any, number: int) -> Any:
    return int(value[number]) if isinstance(value, np.ndarray) else value


def check_predictor(predictor: Predictor, rows: int) -> Predictor:
    """Check that a predictor predicts steps of up to `rows` rows, and return it.

    Raises:
      TypeError: it lacks a method.
      ValueError: it does not support `rows` rows, or predicts a time that is negative or not finite.
    """
    if not all(callable(getattr(predictor, name, None)) for name in ("seconds", "prefill_seconds")):
        raise TypeError(f"predictor must have `seconds` and `prefill_seconds`, got {predictor!r}")
    for seconds in (predictor.seconds(Work(rows)), predictor.prefill_seconds(0, 2 * rows, rows)):
        if not 0 <= seconds < math.inf:
            raise ValueError(f"predictor must give finite seconds of at least 0, got {seconds}")
    return predictor


def readable_tokens(predictor: Predictor, tpot: float | None, stages: int, most: int, chunk: int = 0) -> float:
    """Find the longest context that a rank can read within a TPOT target.

    A decode has to read it within the target, beside a chunk of a new prompt; and so has a chunk of the long request
    itself, beside a decode of another, which waits for it. A token takes `stages` steps, which share the target.

    Where no context is short enough for a step with a chunk, decodes alone count.

    Args:
      predictor: of a stage's steps.
      tpot: the target in seconds; None: there is none.
      stages: pipeline stages, at least 1.
      most: tokens that there may be.
      chunk: tokens of the chunk, the smallest that is efficient; 0: decodes run alone.

    Returns:
      Tokens. Infinite without a target, if they exceed `most`, and if a decode can't read even one token in time, as
      more ranks don't help then.

    Source:
      Mnemosyne, section 4.4 (the limit at which a request grows onto one more rank).

    Examples:
      >>> from longctx.models import LlamaConfig
      >>> from longctx.serving.predictor import readable_tokens
      >>> from longctx.simulation.hardware import predictor
      >>> seconds = predictor(LlamaConfig.preset("llama-3-8b"), "h100-nvlink", max_rows=512)
      >>> readable_tokens(seconds, tpot=0.03, stages=1, most=10**7)
      570443
    """
    alone = Work(window=window_of(predictor))

    def is_met(tokens: int) -> bool:
        decode, short = alone.with_chunk(tokens - 1, 1, True), alone.with_chunk(0, 1, True)
        works = (decode.with_chunk(0, chunk, False), short.with_chunk(tokens, chunk, False)) if chunk else (decode,)
        return all(predictor.seconds(work) <= tpot / stages for work in works)  # type: ignore[operator]

    if tpot is None or is_met(most):
        return math.inf
    if not is_met(1):
        return readable_tokens(predictor, tpot, stages, most) if chunk else math.inf
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


@dataclasses.dataclass(frozen=True)
class SharedWeights:
    """Cost of rows where context ranks share output projections and feed-forward (`ParallelPlan(ffn="all")`).

    Attributes:
      row_bytes: of a hidden state.
      sum_seconds, sum_seconds_per_row: of the sums of replicated rows over ranks, in a layer, beside those over
        `tensor`.
      replicated_share: of the seconds that a row of one rank takes for products, what a replicated one takes: each rank
        multiplies it by a part of the weights alone.

    Source: Helix Parallelism, section 2.
    """

    row_bytes: float
    sum_seconds: float
    sum_seconds_per_row: float
    replicated_share: float


@dataclasses.dataclass(frozen=True)
class ExchangeCost:
    """Cost of what a step's replicated and sharded rows exchange in all layers of a stage.

    The states of replicated rows are merged, and nothing hides that. Of sharded rows, in pass-KV cached and new keys go
    round in N - 1 hops, which attention hides; in pass-Q new keys are gathered, queries go round in N - 1 hops and
    states come home; in all-gather all keys are gathered. Where nothing is cached, in pass-Q no query travels. Where
    the exchange isn't known, the faster one of pass-KV and pass-Q counts, as `exchange="auto"` would choose.

    Attributes:
      layers: of the largest stage.
      ranks: N.
      model, hardware: of one device.
      shared: None: each rank has all weights.

    Source: context parallelism paper, 3.5 and appendix C; Mnemosyne, 4.4; see `longctx.parallel.cost`.
    """

    layers: int
    ranks: int
    model: ModelShape
    hardware: Hardware
    shared: SharedWeights | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_cost", LayerCost(self.model, self.hardware, self.ranks))

    def seconds(self, work: Work, attention: float) -> float:
        """Seconds of a rank's exchanges, in a step in which its attention to prompts' chunks takes `attention`."""
        cost: LayerCost = self._cost  # type: ignore[attr-defined]
        total = self._of_weights(cost, work)
        if work.sharded:
            part = attention / self.layers / self.ranks
            match work.exchange:
                case "pass_kv":
                    total += self._pass_kv(cost, work, part)
                case "pass_q":
                    total += self._pass_q(cost, work, part)
                case "all_gather":
                    total += cost.gather_keys(work.ring_cached + work.sharded)
                case _:
                    total += min(self._pass_kv(cost, work, part), self._pass_q(cost, work, part))
        return self.layers * total

    def concerns(self, work: Work) -> bool:
        """Whether rows of a step exchange anything."""
        return bool(work.sharded or work.replicated or self.shared)

    def rows(self, work: Work) -> int:
        """Rows of one rank whose products take as long as those of a step."""
        if self.shared is None:
            return work.rows
        return work.rows - int(work.replicated * (1 - self.shared.replicated_share))

    def _of_weights(self, cost: LayerCost, work: Work) -> float:
        """Seconds of what rows exchange for the products after attention."""
        shared, replicated = self.shared, work.replicated
        if shared is None:
            return cost.merge(replicated) if replicated else 0.0
        own = work.rows - replicated
        total = cost.share_rows(own, shared.row_bytes) if own else 0.0
        if replicated:
            total += cost.merge_to_heads(replicated) + shared.sum_seconds + replicated * shared.sum_seconds_per_row
        return total

    def _pass_kv(self, cost: LayerCost, work: Work, part: float) -> float:
        return cost.ring(cost.hop((work.ring_cached + work.sharded) * cost.key_bytes), part)

    def _pass_q(self, cost: LayerCost, work: Work, part: float) -> float:
        new = cost.gather_keys(work.sharded)
        # Decodes are sharded only where all rows are, and they have keys that are cached.
        if not work.ring_cached and not (work.decode_keys and work.sharded == work.rows):
            return new
        return new + cost.ring(cost.hop(work.sharded * cost.query_bytes), part) + cost.send_states(work.sharded)


@dataclasses.dataclass(frozen=True)
class CurvePredictor:
    """Predicts operators from data sheets (`roofline`) or tables of measured operators.

    seconds = linear(rows) + attention + per_sample * samples + exchange, see `Work`. Attention of each longer chunk,
    and of all decodes together, takes per_pair * pairs + per_key * keys, less `overlap` times the smaller of these;
    with sliding layers as much again, of what their window leaves, by their own numbers; and what `kernel` adds.

    Attributes:
      rows, linear: knots of a piecewise linear curve: numbers of rows, ascending, and the seconds of everything but
        attention and logits. It continues beyond the last knot, and is constant before the first.
      per_pair: seconds of a pair of a query and a key, in all layers without a window.
      per_key: seconds of a key that is read, in all layers without a window.
      per_sample: seconds of a row of logits.
      exchange: what replicated and sharded rows exchange; None: nothing.
      overlap: of attention's products and reading keys, the longer hides so much of the shorter; 0 to 1.
      buckets: numbers of rows that steps are compiled for, ascending: the linear layers of a batch take what the next
        of them does. Empty, and beyond the last: a batch has no padding.
      sliding: layers with a sliding window; None: there are none.
      kernel: what attention's kernels take beside these.

    Raises:
      ValueError: lengths differ, or a number is negative, not finite or out of order.

    Source:
      Mnemosyne, 4.2, and Medha, 4.2: chunks by predicted time, with predictors after Vidur.

    Examples:
      >>> from longctx.serving.predictor import CurvePredictor, Work
      >>> linear = CurvePredictor(rows=(1, 1024), linear=(0.005, 0.02), per_pair=1e-10, per_key=1e-8, per_sample=1e-6)
      >>> one = linear.seconds(Work.of([(0, 512, False)]))
      >>> late = linear.seconds(Work.of([(1_000_000, 512, False)]))  # the same chunk, after a million tokens
      >>> round(one, 4), round(late, 4)
      (0.0125, 0.0737)
    """

    rows: tuple[int, ...]
    linear: tuple[float, ...]
    per_pair: float
    per_key: float
    per_sample: float
    exchange: ExchangeCost | None = None
    overlap: float = 0.0
    buckets: tuple[int, ...] = ()
    sliding: SlidingCost | None = None
    kernel: KernelSeconds = NO_KERNEL

    def __post_init__(self) -> None:
        if list(self.buckets) != sorted(set(self.buckets)) or any(rows < 1 for rows in self.buckets):
            raise ValueError(f"buckets must be positive and ascending, got {self.buckets}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap must be 0 to 1, got {self.overlap}")
        if len(self.rows) < 2 or len(self.rows) != len(self.linear):
            raise ValueError(f"rows and linear must be of one length, 2 or more: {len(self.rows)}, {len(self.linear)}")
        if self.rows[0] < 1 or list(self.rows) != sorted(set(self.rows)):
            raise ValueError(f"rows must be positive and ascending, got {self.rows}")
        numbers = (*self.linear, self.per_pair, self.per_key, self.per_sample)
        if not all(math.isfinite(x) and x >= 0 for x in numbers) or list(self.linear) != sorted(self.linear):
            raise ValueError(f"seconds must be finite, not negative, and linear not decreasing, got {numbers}")
        knots = zip(self.rows, self.rows[1:], self.linear, self.linear[1:], strict=False)
        slopes = [(after - before) / (end - start) for start, end, before, after in knots]
        object.__setattr__(self, "_slopes", (0.0, *slopes))  # of the line that ends at each knot
        per_decode_key = self.per_pair + self.per_key - self.overlap * min(self.per_pair, self.per_key)
        object.__setattr__(self, "_per_decode_key", per_decode_key)
        object.__setattr__(self, "_last_decodes", (0, 0, 0.0))
        object.__setattr__(self, "_known", {})  # by rows, as the same few thousand are asked for all the time

    @property
    def window(self) -> int:
        """Tokens of a sliding layer's window; 0: there are none."""
        return 0 if self.sliding is None else self.sliding.window

    def seconds(self, work: Work) -> float:
        """Seconds of a batch, as `Predictor.seconds`."""
        rows, samples, decode_keys, chunks, pairs, keys, *_ = work
        if not rows:
            return 0.0
        prompts, kernel, num_decodes = 0.0, 0.0, rows
        if chunks:
            counts = [count for _, count in chunks]
            num_decodes -= sum(counts)
            prompts, kernel = self.per_pair * pairs + self.per_key * keys, self.kernel.of_prompts(counts)
            if self.overlap:
                prompts -= self.overlap * sum([shorter(self.per_pair, self.per_key, *each) for each in chunks])
        in_windows, is_many = 0.0, isinstance(decode_keys, np.ndarray)
        if self.sliding is None and not is_many:
            decodes = self._decode_seconds(num_decodes, decode_keys)
        else:
            seen: Any = decode_keys
            decodes = self._per_decode_key * decode_keys  # type: ignore[attr-defined]
            if self.sliding is not None:
                in_windows, of_decodes, in_window = self.sliding.seconds(work, self.overlap)
                decodes = decodes + of_decodes
                seen = decode_keys + self.sliding.share * (in_window - decode_keys)  # on average over the layers
            if is_many or decode_keys:  # else rows are counted, and no attention
                decodes = decodes + self.kernel.of_decodes(num_decodes, seen, decodes)
        attention = prompts + in_windows + kernel + decodes
        if self.exchange is not None and self.exchange.concerns(work):
            rows, moved = self.exchange.rows(work), self._exchange_seconds(work, prompts, in_windows, kernel)
            return self._linear_seconds(rows) + attention + self.per_sample * samples + moved
        return self._linear_seconds(rows) + attention + self.per_sample * samples

    def _exchange_seconds(self, work: Work, prompts: float, in_windows: float, kernel: float) -> float:
        """Seconds of exchanges beside the attention to prompts' chunks in layers of each kind, and kernels of both."""
        assert self.exchange is not None
        if self.sliding is None:
            return self.exchange.seconds(work, prompts + kernel)
        # What attention hides of an exchange follows from its seconds in one layer.
        share, seconds = self.sliding.share, 0.0
        for part, attention in ((1 - share, prompts), (share, in_windows)):
            if part:
                seconds += part * self.exchange.seconds(work, attention / part + kernel)
        return seconds

    def prefill_seconds(self, start: int, stop: int, chunk: int) -> float:
        """Seconds of prefilling a prompt alone, as `Predictor.prefill_seconds`."""
        if stop <= start:
            return 0.0
        steps, rest = divmod(stop - start, chunk)
        if chunk == 1 or (rest == 1 and not steps):  # such chunks are decodes
            none = Work(window=self.window)
            return sum(self.seconds(none.with_chunk(at, 1, False)) for at in range(start, stop)) + self.per_sample
        if rest == 1:
            last = Work(window=self.window).with_chunk(stop - 1, 1, False)
            return self.prefill_seconds(start, stop - 1, chunk) + self.seconds(last)
        linear = steps * self._row_seconds(chunk) + (self._row_seconds(rest) if rest else 0.0)
        pairs, keys = pairs_and_keys(start, stop, chunk)
        hidden = 0.0
        if self.overlap:
            hidden = self.overlap * shorter_of_steps(self.per_pair, self.per_key, start, stop, chunk)
        seconds = linear + self.per_pair * pairs + self.per_key * keys - hidden + self.per_sample
        seconds += steps * self.kernel.of_prompts([chunk]) + (self.kernel.of_prompts([rest]) if rest else 0.0)
        return seconds + (
            0.0 if self.sliding is None else self.sliding.prefill_seconds(start, stop, chunk, self.overlap)
        )

    def chunk_curve(self, work: Work, start: int) -> Callable[[int], float]:
        """The seconds of a batch with one more local chunk, see `curves_of`."""
        if self.sliding is not None or (self.exchange is not None and self.exchange.concerns(work)):
            return lambda count: self.seconds(work.with_chunk(start, count, False))
        rows, samples, decode_keys, chunks, pairs, keys, *_ = work
        per_pair, per_key, overlap, linear = self.per_pair, self.per_key, self.overlap, self._linear_seconds
        per_decode_key, known = self._per_decode_key, self._known  # type: ignore[attr-defined]
        in_chunks, longest, hidden, kernel = 0, 0, 0.0, self.kernel
        for begin, tokens in chunks:
            in_chunks, longest = in_chunks + tokens, max(longest, tokens)
            hidden += shorter(per_pair, per_key, begin, tokens) if overlap else 0.0
        decodes = self._decode_seconds(rows - in_chunks, decode_keys)
        logits, keys, of_chunks = self.per_sample * samples, keys + start, kernel.chunk * (len(chunks) + 1)
        of_step, path, path_most, row = kernel.prompts, kernel.path, kernel.path_most, kernel.row

        def seconds(count: int) -> float:
            if count == 1:  # it counts as a decode
                if chunks:
                    return self.seconds(work.with_chunk(start, 1, False))
                seen = decode_keys + start + 1
                read = per_decode_key * seen
                return linear(rows + 1) + (read + kernel.of_decodes(rows + 1, seen, read)) + logits
            own = count * start + count * (count + 1) // 2
            prompts = per_pair * (pairs + own) + per_key * (keys + count)
            if overlap:
                products, reads = per_pair * own, per_key * (start + count)
                prompts -= overlap * (hidden + (products if products < reads else reads))
            along = path * (count if count > longest else longest)
            if along > path_most:
                along = path_most
            of_rows = known.get(rows + count)
            if of_rows is None:
                of_rows = linear(rows + count)
            # In the order of `seconds`, so that both are the same to the last bit.
            return of_rows + (prompts + (of_step + along + row * (in_chunks + count) + of_chunks) + decodes) + logits

        return seconds

    def _decode_seconds(self, decodes: int, keys: int) -> float:
        """Seconds of decodes' attention in layers without a window, of the last call if it was of the same decodes."""
        if not keys:
            return 0.0  # rows are counted, and no attention
        last: tuple[int, int, float] = self._last_decodes  # type: ignore[attr-defined]
        if last[0] != decodes or last[1] != keys:
            read: float = self._per_decode_key * keys  # type: ignore[attr-defined]
            last = decodes, keys, read + self.kernel.of_decodes(decodes, keys, read)
            object.__setattr__(self, "_last_decodes", last)
        return last[2]

    def _row_seconds(self, rows: int) -> float:
        """Seconds of everything but attention and logits for local rows."""
        moved = 0.0
        if self.exchange is not None and self.exchange.shared is not None:
            moved = self.exchange.seconds(Work(rows), 0.0)
        return self._linear_seconds(rows) + moved

    def _linear_seconds(self, rows: int) -> float:
        known: dict[int, float] = self._known  # type: ignore[attr-defined]
        seconds = known.get(rows)
        if seconds is None:
            computed = next((bucket for bucket in self.buckets if bucket >= rows), rows)
            at = min(bisect_left(self.rows, computed), len(self.rows) - 1)
            slope = self._slopes[at]  # type: ignore[attr-defined]
            seconds = self.linear[at] + slope * (computed - self.rows[at])
            if len(known) < _REMEMBERED:
                known[rows] = seconds
        return seconds
