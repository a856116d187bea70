"""Window pages: held as far back as the next token sees, found by others, and never too few."""

from collections import Counter

import pytest
from bare_scheduler import BareScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.serving import EngineConfig, ParallelPlan
from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.kv_cache.window_pages import NO_PAGE, WindowPages, window_span
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.look_ahead import copy_scheduler
from longctx.serving.scheduler.policy import POLICIES
from longctx.serving.scheduler.sequence import Sequence, State


class WindowedScheduler(BareScheduler):
    """A scheduler of a model with a window, and what is written in every page and window page."""

    def __init__(self, *arguments: object, window: int, **options: object) -> None:
        super().__init__(*arguments, window=window, **options)  # type: ignore[arg-type]
        assert self.pool.windows is not None
        self.window, self.windows = window, self.pool.windows
        self._written: tuple[dict[tuple[int, int], object], ...] = ({}, {})
        self.most_held = 0

    def compute(self, batch: Batch) -> None:
        for sequence, _, start, count, *_ in batch.chunks:
            for position in range(start, start + count):
                for written, page in zip(self._written, self._places(sequence, position), strict=True):
                    written[page, position % self.page_size] = self._token(sequence, position)
        # As on a device, all rows are written before one is read.
        for sequence, _, start, count, *_ in batch.chunks:
            oldest = max(0, start - self.window + 1)
            for position in range(start + count):
                places = self._places(sequence, position)
                for written, page in zip(self._written, places[: 1 + (position >= oldest)], strict=False):
                    assert written[page, position % self.page_size] == self._token(sequence, position)
        self.most_held = max(self.most_held, self.windows.num_held)

    def _places(self, sequence: Sequence, position: int) -> tuple[int, int]:
        number = position // self.page_size
        return sequence.pages[number], sequence.window_pages[number]

    def _token(self, sequence: Sequence, position: int) -> object:
        number = position // self.page_size
        return (sequence.keys[number] if number < len(sequence.keys) else sequence.order), position

    def check(self) -> None:
        super().check()
        pool, windows, holders = self.pool, self.windows, Counter[int]()
        for sequence in self.scheduler.running:
            held = sequence.window_pages
            assert len(held) == len(sequence.pages)
            for number, window in enumerate(held):
                if window != NO_PAGE:
                    assert windows.find(sequence.pages[number]) == window
                    assert pool.rank_of(sequence.pages[number]) == window // windows.per_rank
                    holders[window] += 1
            first = max(0, sequence.computed // self.page_size - windows.span)
            if sequence.state is not State.LOADING:
                assert NO_PAGE not in held[first : self.running_pages(sequence)], "a row sees what is not held"
        assert windows.num_held == len(holders) or (self.plan.stage > 1 and windows.num_held > len(holders))
        if not self.scheduler.running:
            assert windows.num_held == 0
            assert windows.num_idle <= pool.num_cached

    def running_pages(self, sequence: Sequence) -> int:
        return -(-sequence.computed // self.page_size)

    def check_empty(self) -> None:
        super().check_empty()
        assert self.windows.num_held == 0


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_a_row_sees_is_held_and_was_written_by_its_own_tokens(data: st.DataObject) -> None:
    """Small pools, prefixes that are shared, cancels and preemptions; every step is checked token by token."""
    draw = data.draw
    context, stage = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    plan = ParallelPlan(
        stage,
        context,
        exchange=draw(st.sampled_from(["kvp", "pass_q"])),
        placement=draw(st.sampled_from(["grow", "interleave"])),
        rank_tokens=draw(st.sampled_from([None, 4, 10, 24])),
    )
    page_size, num_pages = draw(st.sampled_from([1, 2, 4])), draw(st.integers(2, 40))
    run = WindowedScheduler(
        plan,
        num_pages,
        page_size,
        draw(st.sampled_from(["reserve", "optimistic"])),
        draw(st.sampled_from(sorted(POLICIES))),
        max_running=draw(st.integers(1, 5)),
        token_budget=draw(st.sampled_from([5, 16])),
        window=draw(st.integers(1, 40)),
    )
    most = num_pages * context * page_size if plan.placement == "grow" else num_pages * page_size
    for _ in range(draw(st.integers(1, 20))):
        tokens = draw(st.integers(2, min(most, 120)))
        prompt = draw(st.integers(1, tokens - 1))
        run.add(prompt, min(tokens - prompt, 30), draw(st.sampled_from(["", "one", "one", "other"])))
        for _ in range(draw(st.integers(0, 8))):
            run.step()
            run.check()
        if draw(st.integers(0, 9)) == 0:
            run.cancel(draw(st.sampled_from(run.sequences)))
        if draw(st.integers(0, 9)) == 0:
            run.pool.clear()
        if draw(st.integers(0, 9)) == 0:
            copy_scheduler(run.scheduler).schedule(run.now)  # changes nothing
    while run.has_work:
        run.step()
        run.check()
        assert len(run.batches) < 20_000
    run.check_empty()


def test_window_pages_follow_the_window_and_not_the_length() -> None:
    run = WindowedScheduler(ParallelPlan(), 4000, page_size=4, window=30, max_running=2, token_budget=16)
    long = run.add(1500, 100)
    run.run()
    assert len(run.batches) > 150
    assert run.most_held <= 8 + 1 + 4 + 1, "the span, its own page, those of a step"
    assert long.window_pages == []
    run.check_empty()


def test_many_decodes_hold_their_windows_only() -> None:
    run = WindowedScheduler(ParallelPlan(), 4000, page_size=4, window=9, max_running=6, token_budget=16)
    for _ in range(6):
        run.add(5, 150)
    run.run()
    assert run.most_held <= 6 * (2 + 1 + 1)


@pytest.mark.parametrize(("span", "found"), [(0, 6), (1, 6), (2, 4), (3, 4), (4, 4), (6, 4)])
def test_a_prefix_ends_where_its_last_token_still_has_its_window(span: int, found: int) -> None:
    """Of six pages, the one before the last has lost its window page."""
    windows = WindowPages(20, 20, 1, span)
    pool = PagePool(20, windows=windows)
    pages = [pool.allocate(0, False) for _ in range(6)]
    keys = [b"%d" % i for i in range(6)]
    for page, key in zip(pages, keys, strict=True):
        held = windows.hold(page)
        if key != b"4":
            pool.register(page, key)
        windows.release(held, pool.is_found(page))
    pool.register(pages[4], b"4")
    assert pool.leading(keys) == pages[:found]


def test_a_page_with_its_window_page_takes_the_place_of_one_without() -> None:
    windows = WindowPages(1, 3, 1, 1)
    pool = PagePool(3, windows=windows)
    first, second = pool.allocate(0, False), pool.allocate(0, False)
    windows.release(windows.hold(first), False)
    assert pool.register(first, b"key")
    assert pool.leading([b"key"]) == []
    window = windows.hold(second)
    assert pool.register(second, b"key")
    assert (pool.leading([b"key"]), pool.is_found(first)) == ([second], False)
    windows.release(window, pool.is_found(second))
    third = pool.allocate(0, False)
    assert not pool.register(third, b"key"), "the other one has its window page"
    assert windows.hold(third) == window, "the least recently used one goes"
    assert pool.leading([b"key"]) == []
    assert pool.register(third, b"key")
    pool.release([third])
    windows.release(window, True)
    assert pool.clear() == 1
    assert (windows.num_idle, windows.num_held) == (0, 0), "who can't be found has no use for it"


def test_a_later_prompt_begins_after_the_window_of_an_earlier_one() -> None:
    run = WindowedScheduler(ParallelPlan(), 200, page_size=4, window=30)
    run.add(121, 1, "document")
    run.run()
    again = run.add(121, 1, "document")
    run.run()
    assert again.cached == 120
    before = run.add(61, 1, "document")
    run.run()
    assert before.cached == 60, "window pages that no sequence holds are found as long as no other needs them"


def test_evicted_windows_are_computed_again_and_then_found() -> None:
    run = WindowedScheduler(ParallelPlan(), 400, page_size=4, window=30, max_running=1, token_budget=16)
    for document in ("one", "other"):
        run.add(121, 1, document)
        run.run()
    assert run.windows.num_pages < 30, "those of one document alone"
    for cached in (0, 120):
        again = run.add(121, 1, "one")
        run.run()
        assert again.cached == cached


def test_too_few_window_pages_are_refused() -> None:
    config = EngineConfig(num_pages=1000, page_size=16, max_running=4, token_budget=64, num_window_pages=20)
    with pytest.raises(ValueError, match="num_window_pages must be at least 44 for max_running=4 and a window of 100"):
        config.count_window_pages(100, ParallelPlan(), 1000, 10_000)
    with pytest.raises(ValueError, match="num_window_pages must be None without sliding layers, got 20"):
        config.count_window_pages(None, ParallelPlan(), 1000, 10_000)
    assert config.count_window_pages(100, ParallelPlan(), 10, 10_000) == 10
    assert window_span(1, 16) == 0
