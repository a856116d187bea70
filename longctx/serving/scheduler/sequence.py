"""One sequence as the scheduler knows it: plain data, and the states that it goes through."""

import copy
import enum
import math
from dataclasses import dataclass, field

from longctx.serving.kv_cache.connector import TIERS
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.placement import Placement
from longctx.serving.kv_cache.prefix import PartialPage
from longctx.serving.request.completion import Completion


class State(enum.Enum):
    """The states of a sequence. Preemption (optimistic admission) leads from the middle three to WAITING."""

    WAITING = "waiting"  # holds nothing
    LOADING = "loading"  # has a slot and pages; waits for keys and values from beyond the devices
    PREFILLING = "prefilling"  # has a slot and pages; tokens to compute before the next can be sampled
    DECODING = "decoding"  # every step computes the token that the step before has sampled
    FINISHED = "finished"


_NEXT = {
    State.WAITING: {State.PREFILLING, State.FINISHED},
    State.LOADING: {State.PREFILLING, State.WAITING, State.FINISHED},
    State.PREFILLING: {State.LOADING, State.DECODING, State.WAITING, State.FINISHED},
    State.DECODING: {State.WAITING, State.FINISHED},
    State.FINISHED: set(),
}


@dataclass(eq=False)
class Sequence:
    """The sequence of one completion. The scheduler decides by these fields and never reads `completion`.

    `length` counts tokens that are known or being sampled, `computed` those whose keys and values are written or
    planned to be: plans run ahead of results. `in_flight` counts samples that are planned and not yet received.
    """

    name: str
    order: int  # of arrival
    prompt_length: int
    max_tokens: int
    arrival: float = 0.0
    priority: int = 0
    tenant: str = ""
    ttft_deadline: float | None = None
    tpot_target: float | None = None
    keys: list[Key] = field(default_factory=list)  # of its full pages, as far as tokens are known
    partial_page: PartialPage | None = None  # that the turn before it left
    needs_tokens: bool = False  # the mask of a token depends on those before it
    may_share: bool = True  # begin with pages that others have computed
    available: int = 0  # leading tokens that can be loaded, as far as is known
    source: str = TIERS  # where from
    tail_key: Key | None = None  # of a last, partial page that can be loaded
    completion: Completion | None = None  # what executors read tokens from

    state: State = State.WAITING
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)  # of each page, or `NO_PAGE`; empty: no layer has a window
    window_first: int = 0  # the first page whose window page it may hold
    placement: Placement | None = None  # of pages to come
    ranks: tuple[int, ...] = ()  # that its pages are on
    rank_pages: list[int] = field(default_factory=list)  # how many of them each rank has; empty: none has any
    reserved: list[int] = field(default_factory=list)  # pages of each rank
    claim: int = 0  # pages that it may still need, and is not promised: it grows
    promised: int = 0  # pages of whichever rank
    reach: float = math.inf  # tokens that it has pages or promises of given ranks for
    ready: int = 0  # the first step that its next rows may be in
    registered: int = 0  # pages that have been offered for sharing, or were shared
    length: int = 0
    computed: int = 0
    loading_until: int = 0  # tokens that it has when its load is complete
    in_flight: int = 0
    cached: int | None = None  # tokens found in the cache when first admitted
    preemptions: int = 0
    recomputed: int = 0  # tokens that it lost by that: they were not in the cache any more
    tokens_to_recompute: int = 0  # tokens that it had computed when it was preempted, until it runs again
    no_preempt_before: int = 0  # computed tokens up to which no more urgent sequence may preempt it
    least_pages: int = 0  # that it needs to begin, while it waits
    passed_by: int = 0  # how many less urgent ones were admitted while it had no room

    # What policies read: seconds, promised and predicted.
    deadline: float = 0.0  # when its first token is due
    ttft_budget: float = 1.0  # from its arrival to the deadline
    prefill_remaining: float = 0.0  # that the rest of its prompt takes, computed alone
    predicted_at: int = 0  # the token from which that was predicted last as a whole
    due_share: float = 0.0  # of the step that is planned, with which it is read by its deadline; above 1 if it can't be
    prefix_hit_tokens: int = 0  # tokens of its prompt that were in the cache when it came
    slack: float | None = None  # relative, when it was last admitted

    def __post_init__(self) -> None:
        if self.prompt_length < 1 or self.max_tokens < 1:
            raise ValueError("prompt_length and max_tokens must be at least 1")
        self.length = self.prompt_length

    def __deepcopy__(self, memo: dict[int, object]) -> "Sequence":
        """For looking ahead: without its completion, and with the same keys, which a look ahead only reads."""
        memo[id(self)] = twin = copy.copy(self)
        twin.completion, twin.pages, twin.reserved = None, self.pages.copy(), self.reserved.copy()
        twin.rank_pages, twin.window_pages = self.rank_pages.copy(), self.window_pages.copy()
        twin.placement = None if self.placement is None else self.placement.copy()
        return twin

    def to(self, state: State) -> None:
        assert state in _NEXT[self.state], f"{self.name}: {self.state.value} can't become {state.value}"
        self.state = state

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next can be sampled."""
        return self.length - self.computed

    @property
    def plannable(self) -> int:
        """Tokens of `remaining` that may be planned: the last one once all pages that it may need are promised."""
        left, most = self.length - self.computed - (self.claim > 0), self.reach - self.computed
        return left if left <= most else int(most)

    @property
    def is_drained(self) -> bool:
        """Whether all of its samples are planned."""
        return self.length == self.prompt_length + self.max_tokens

    @property
    def is_running(self) -> bool:
        return self.state in (State.LOADING, State.PREFILLING, State.DECODING)


def completion_of(sequence: Sequence) -> Completion:
    """The completion of a sequence that an engine serves; those of tests of decisions alone have none."""
    assert sequence.completion is not None
    return sequence.completion
