"""Rows of steps: how many prompts may fill, the numbers that steps are compiled for, and the exchanges of these."""

from collections.abc import Sequence as List
from typing import NamedTuple

from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.validation import shown

Rows = tuple[int, int, int]
"""Numbers of sharded, replicated and local rows of a rank."""

_RINGS = ("pass_kv", "all_gather")  # exchanges in which keys travel


class Chunking(NamedTuple):
    """`static`: `tokens` rows in every step (Sarathi). `adaptive`: up to `tokens`, as many as keep the decodes' TPOT.

    Source: Medha, 3.2; Mnemosyne, 4.2.
    """

    adaptive: bool
    tokens: int

    @classmethod
    def parse(cls, text: str, token_budget: int, max_running: int) -> "Chunking":
        """From `"adaptive"`, `"static"` or `"static:N"`.

        Raises:
          TypeError, ValueError: it is none of these, or N is not `max_running` to `token_budget`: with fewer, decodes
            might leave no row for any prompt.
        """
        if not isinstance(text, str):
            raise TypeError(f"chunking must be a string, got {text!r}")
        name, colon, number = text.partition(":")
        is_number = number.isascii() and number.isdecimal() and len(number) < 10
        if name not in ("static", "adaptive") or (colon and (name == "adaptive" or not is_number)):
            raise ValueError(f'chunking must be "static", "static:N" or "adaptive", got {shown(text)}')
        tokens = int(number) if colon else token_budget
        if not max_running <= tokens <= token_budget:
            raise ValueError(
                f"chunking must have max_running={max_running} to token_budget={token_budget} tokens, got {text!r}"
            )
        return cls(name == "adaptive", tokens)


def allows_kv_exchange(plan: ParallelPlan, buckets: List[int], sharded: int, *others: int) -> bool:
    """Whether a step with so many rows of each kind is compiled for other exchanges than pass-Q, by a rule.

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
        """The smallest buckets that hold so many rows; for no row at all, those of one row."""
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
