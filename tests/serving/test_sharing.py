"""What requests share: prefixes, pages of samples, a conversation's last page; and what makes room."""

import hashlib

import numpy as np
import pytest
from fake_device import VOCAB, FakeDevice, FakeExecutor, expected_tokens, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from workload import Workload

from longctx.serving import ParallelPlan, Request, SamplingParams
from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.scheduler.sequence import Sequence

PROMPT = np.random.default_rng(0).integers(0, VOCAB, 45).tolist()
TEN = SamplingParams(max_tokens=10, ignore_eos=True)


def test_a_prefix_is_found_up_to_its_last_full_page() -> None:
    engine = make_engine(page_size=8)
    first, second, other = (
        engine.generate([Request(prompt, TEN, tenant=tenant)])[0]
        for prompt, tenant in ((PROMPT, "a"), ([*PROMPT[:40], 1, 2, 3], "a"), (PROMPT, "b"))
    )
    assert [x.metrics.cached_tokens for x in (first, second, other)] == [0, 40, 0]
    assert second.token_ids == expected_tokens([*PROMPT[:40], 1, 2, 3], TEN)
    # What was generated is found too, but for the last token, whose keys were never computed.
    (third,) = engine.generate([Request(PROMPT + first.token_ids + [5], TEN, tenant="a")])
    assert third.metrics.cached_tokens == (45 + 9) // 8 * 8
    assert engine.stats().cached_tokens == 40 + third.metrics.cached_tokens


def test_pages_and_sessions_are_shared_under_one_salt_only() -> None:
    engine = make_engine(page_size=8)

    def run(prompt: list[int], salt: str, tenant: str = "t") -> int:
        request = Request(prompt, TEN, session_id="s", tenant=tenant, cache_salt=salt)
        (output,) = engine.generate([request])
        assert output.token_ids == expected_tokens(prompt, TEN)
        return output.metrics.cached_tokens

    assert [run(PROMPT, salt) for salt in ("", "a", "b", "a")] == [0, 0, 0, 40]
    assert [run(PROMPT, "a", tenant) for tenant in ("u", "ta", "")] == [0, 0, 0]
    # The next turn goes on in the last turn's partial page.
    turns = [PROMPT[:start] for start in (3, 2)]
    assert [run(turn, "c") for turn in turns] == [0, 0]
    after = turns[1] + expected_tokens(turns[1], TEN) + [1]
    assert [run(after, salt) for salt in ("d", "", "c")] == [0, 0, 11]
    page_hash = PageHash(bytes(16), 8)
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"), ("salt", ""), ("", "salt")]
    assert len({page_hash.root(*pair) for pair in pairs}) == len(pairs)


def test_one_token_is_always_computed() -> None:
    engine = make_engine(page_size=5)
    assert [engine.generate(PROMPT, TEN)[0].metrics.cached_tokens for _ in range(2)] == [0, 40]
    assert engine.generate(PROMPT, TEN)[0].token_ids == expected_tokens(PROMPT, TEN)


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    engine = make_engine(page_size=8)
    engine.generate(PROMPT, TEN)
    (output,) = engine.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.metrics.cached_tokens == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [45, 40, 3])
def test_completions_share_the_pages_of_their_prompt(length: int, prefix_cache: bool) -> None:
    engine = make_engine(page_size=8, prefix_cache=prefix_cache)
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    device = executor.runner
    assert isinstance(device, FakeDevice)
    params = SamplingParams(max_tokens=6, temperature=1.0, n=4, seed=3, ignore_eos=True)
    events = engine.stream(PROMPT[:length], params)
    most, answers = 0, {}
    for event in events:
        most = max(most, engine.scheduler.pool.num_held)
        if event.output is not None:
            answers[event.index] = event.output.token_ids
    assert answers == {i: expected_tokens(PROMPT[:length], params, i) for i in range(4)}
    assert len({tuple(x) for x in answers.values()}) == 4
    own = -(-(length + 5) // 8) - (length - 1) // 8  # from the page with the prompt's last token on
    assert most <= (length - 1) // 8 + 4 * own
    assert device.num_rows <= length + 3 * 8 + 4 * 5  # each computes at most one page of the prompt that is not shared


def test_prompt_logprobs_come_with_the_first_completion() -> None:
    engine = make_engine(page_size=8)
    engine.generate(PROMPT, TEN)
    params = SamplingParams(max_tokens=6, temperature=1.0, n=3, seed=3, prompt_logprobs=0, ignore_eos=True)
    outputs = engine.generate(PROMPT, params)
    assert [x.token_ids for x in outputs] == [expected_tokens(PROMPT, params, i) for i in range(3)]
    assert [len(x.prompt_logprobs or ()) for x in outputs] == [len(PROMPT) - 1, 0, 0]
    assert outputs[0].metrics.cached_tokens == 0


PLANS = [
    ParallelPlan(),
    ParallelPlan(stage=3),
    ParallelPlan(context=2, exchange="kvp", rank_tokens=24),
    ParallelPlan(context=3, exchange="pass_q", placement="interleave"),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("policy", ["fcfs", "srpf", "ilrs"])
def test_a_burst_computes_its_common_prefix_once(policy: str, plan: ParallelPlan) -> None:
    """Requests that arrive together, whose prompts begin alike."""
    engine = make_engine(60, 4, plan, policy=policy, max_running=6)
    executor = engine.executor
    assert isinstance(executor.runner, FakeDevice)  # type: ignore[attr-defined]
    five = SamplingParams(max_tokens=5, ignore_eos=True)
    prompts = [[*PROMPT[:40], i, i + 1] for i in range(6)]
    outputs = engine.generate(prompts, five)
    assert [x.token_ids for x in outputs] == [expected_tokens(prompt, five) for prompt in prompts]
    cached = [x.metrics.cached_tokens for x in outputs]
    assert sorted(cached) == [0] + [40] * 5


def test_nobody_waits_for_a_prefix_longer_than_computing_it_takes() -> None:
    """Who computes the prefix gets no rows, and one that comes before it goes on by itself."""

    class LongFirst:
        def urgency(self, sequence: Sequence, now: float) -> float:
            return sequence.order if sequence.prompt_length != 200 else -1.0

        def share(self, sequence: Sequence, now: float) -> float:
            return 0.0

    engine = make_engine(200, 4, policy=LongFirst(), max_running=4)
    first = engine.stream([*PROMPT[:40], 1], TEN)
    engine.step()  # the first one is admitted, and has begun
    blocking = engine.stream([2] * 200, TEN)
    second = engine.stream(Request([*PROMPT[:40], 3], TEN, priority=1))
    outputs = [event.output for stream in (first, blocking, second) for event in stream if event.output is not None]
    assert [x.token_ids for x in outputs] == [
        expected_tokens(prompt, TEN) for prompt in ([*PROMPT[:40], 1], [2] * 200, [*PROMPT[:40], 3])
    ]
    metrics = outputs[2].metrics
    assert metrics.cached_tokens < 40
    assert metrics.admitted is not None
    assert outputs[1].metrics.first_token is not None
    assert metrics.admitted < outputs[1].metrics.first_token


def test_a_wait_for_a_prefix_ends_with_its_maker() -> None:
    engine = make_engine(60, 4)
    first = engine.stream([*PROMPT[:40], 1], TEN)
    second = engine.stream([*PROMPT[:40], 3], TEN)
    engine.step()
    first.close()
    assert [t for event in second for t in event.token_ids] == expected_tokens([*PROMPT[:40], 3], TEN)


def test_a_sequence_that_waits_for_a_prefix_may_be_cancelled() -> None:
    engine = make_engine(60, 4)
    streams = [engine.stream([*PROMPT[:40], i], TEN) for i in range(3)]
    engine.step()
    assert len(engine.scheduler.waiting) == 2
    streams.append(engine.stream([1] * 150, SamplingParams(max_tokens=60)))  # which does not fit beside the first
    streams[1].close()
    streams[2].close()
    assert [t for event in streams[0] for t in event.token_ids] == expected_tokens([*PROMPT[:40], 0], TEN)


def test_a_wait_ends_though_another_request_has_no_room() -> None:
    """The second completion is admitted once its prefix is there, before a later request that waits for memory."""
    large = Request(np.random.default_rng(1).integers(0, VOCAB, 100).tolist(), SamplingParams(max_tokens=60))
    admitted = []
    for others in ([], [large]):
        engine = make_engine(60, 4, policy="fcfs", max_running=4)
        params = SamplingParams(max_tokens=60, temperature=1.0, n=2, seed=1, ignore_eos=True)
        outputs = engine.generate([Request(PROMPT[:40], params), *others])
        admitted.append([x.metrics.admitted for x in outputs[:2]])
    assert admitted[0] == admitted[1]


class Bursts(Workload):
    """Requests come several at once, and many begin alike."""

    def submit(self) -> None:
        for _ in range(int(self.rng.integers(1, 6))):
            super().submit()


@settings(max_examples=4)
@given(
    seed=st.integers(0, 2**20),
    plan=st.sampled_from(PLANS),
    policy=st.sampled_from(["fcfs", "srpf", "lrs", "lrs_relative", "ilrs"]),
    admission=st.sampled_from(["reserve", "optimistic"]),
    run_ahead=st.integers(1, 4),
)
def test_random_bursts(seed: int, plan: ParallelPlan, policy: str, admission: str, run_ahead: int) -> None:
    engine = make_engine(90, 2, plan, policy=policy, admission=admission, run_ahead=run_ahead)
    Bursts(engine, seed).run(80)


def test_the_next_turn_finds_the_partial_page_too() -> None:
    engine = make_engine(page_size=8)
    conversation, cached = PROMPT[:21], []
    for turn in range(4):
        (output,) = engine.generate([Request(conversation, TEN, session_id="s")])
        assert output.token_ids == expected_tokens(conversation, TEN)
        cached.append(output.metrics.cached_tokens)
        known = len(conversation) + 9  # all but the last token's keys
        conversation = conversation + output.token_ids + [turn, turn]
    assert cached[0] == 0
    assert cached[3] == known - 12  # what the third turn had known
    assert cached[3] % 8 != 0


def test_two_turns_at_once_do_not_share_the_partial_page() -> None:
    engine = make_engine(page_size=16, num_pages=40)
    (first,) = engine.generate([Request(PROMPT[:21], TEN, session_id="s")])
    turns = [Request(PROMPT[:21] + first.token_ids + [i], TEN, session_id="s") for i in range(3)]
    outputs = engine.generate(turns)
    assert [x.token_ids for x in outputs] == [expected_tokens(list(x.prompt), TEN) for x in turns]
    assert sorted(x.metrics.cached_tokens for x in outputs) == [16, 16, 30]


def test_a_turn_that_differs_within_the_partial_page_uses_what_is_equal() -> None:
    engine = make_engine(page_size=16, num_pages=40)
    (first,) = engine.generate([Request(PROMPT[:21], TEN, session_id="s")])
    changed = PROMPT[:21] + first.token_ids[:2] + [(first.token_ids[2] + 1) % VOCAB, 4]
    (second,) = engine.generate([Request(changed, TEN, session_id="s")])
    assert second.metrics.cached_tokens == 23
    assert second.token_ids == expected_tokens(changed, TEN)


def test_an_idle_conversation_makes_room() -> None:
    engine = make_engine(page_size=8, num_pages=8)
    (first,) = engine.generate([Request(PROMPT[:21], TEN, session_id="s")])
    engine.generate(PROMPT, SamplingParams(max_tokens=18, ignore_eos=True))
    (second,) = engine.generate([Request(PROMPT[:21] + first.token_ids, TEN, session_id="s")])
    assert engine.stats().pages_evicted > 0
    assert second.token_ids == expected_tokens(PROMPT[:21] + first.token_ids, TEN)


def test_least_recently_used_pages_go_first_and_tails_before_heads() -> None:
    pool = PagePool(6)
    chains = [[pool.allocate(0, False) for _ in range(3)] for _ in range(2)]
    for name, chain in zip("ab", chains, strict=True):
        for i, page in enumerate(chain):
            pool.register(page, f"{name}{i}".encode())
        pool.release(chain)
    pool.share(chains[0][0])  # the head of a is used once more
    pool.release([chains[0][0]])
    order = [pool.allocate(0, False) for _ in range(6)]
    assert order == [chains[0][2], chains[0][1], *reversed(chains[1]), chains[0][0]]
    assert pool.num_evicted == 6
    assert pool.num_cached == 0


def test_keys_stand_for_the_whole_prefix() -> None:
    page_hash = PageHash(bytes(16), 4)
    tokens = np.arange(12, dtype=np.int32)

    def keys(tokens: np.ndarray, tenant: str = "", page_hash: PageHash = page_hash) -> list[bytes]:
        result: list[bytes] = []
        page_hash.extend(result, tokens, page_hash.root(tenant))
        return result

    assert len(set(keys(tokens))) == 3
    assert keys(tokens) == keys(np.append(tokens, 99).astype(np.int32)[:14])
    changed = tokens.copy()
    changed[0] += 1
    assert not set(keys(tokens)) & set(keys(changed))
    assert not set(keys(tokens)) & set(keys(tokens, "tenant"))
    assert not set(keys(tokens)) & set(keys(tokens, page_hash=PageHash(bytes([1] * 16), 4)))


@given(st.integers(1, 9), st.lists(st.integers(0, 60), max_size=4))
def test_keys_are_a_chain_of_keyed_hashes(size: int, lengths: list[int]) -> None:
    """Stored pages, and other hosts, have them: they must stay what they are, however a prompt grows."""
    secret, tokens, keys = b"s" * 32, np.random.default_rng(size).integers(0, VOCAB, 60, dtype=np.int32), list[bytes]()
    pages = PageHash(secret, size)
    parent = pages.root("tenant", "salt")
    for length in lengths:
        pages.extend(keys, tokens[:length], pages.root("tenant", "salt"))
    assert len(keys) == max(lengths, default=0) // size
    for number, key in enumerate(keys):
        read = parent + tokens[number * size : (number + 1) * size].tobytes()
        parent = hashlib.blake2b(read, key=secret, digest_size=16, person=b"page").digest()
        assert key == parent


def test_a_partial_page_is_known_by_its_contents() -> None:
    """Turns of one session that share nothing, that end in one page, and one that waits while another rewrites it."""
    engine = make_engine(page_size=16, num_pages=40)
    for prompt in ([1, 2, 3], [4, 5, 6]):
        (output,) = engine.generate([Request(prompt, TEN, session_id="s")])
    again = [4, 5, 6, *output.token_ids, 9]
    (output,) = engine.generate([Request(again, TEN, session_id="s")])
    assert output.metrics.cached_tokens == 12
    assert output.token_ids == expected_tokens(again, TEN)

    engine = make_engine(page_size=16, num_pages=40, max_running=1)
    (first,) = engine.generate([Request(PROMPT[:3], TEN, session_id="s")])
    both = [PROMPT[:3] + first.token_ids[:2] + [(first.token_ids[2] + i) % VOCAB, 4] for i in (1, 0)]
    outputs = engine.generate([Request(prompt, TEN, session_id="s") for prompt in both])
    assert [x.token_ids for x in outputs] == [expected_tokens(prompt, TEN) for prompt in both]


def test_prompt_logprobs_do_not_begin_in_a_partial_page() -> None:
    engine = make_engine(page_size=16, num_pages=40)
    (first,) = engine.generate([Request(PROMPT[:3], TEN, session_id="s")])
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    (second,) = engine.generate([Request(PROMPT[:3] + first.token_ids, params, session_id="s")])
    assert second.metrics.cached_tokens == 0


def test_completions_that_do_not_fit_together_take_turns() -> None:
    engine = make_engine(num_pages=4, page_size=4)
    params = SamplingParams(max_tokens=9, temperature=1.0, n=6, seed=1, ignore_eos=True)
    outputs = engine.generate([1] * 4, params)
    assert [x.token_ids for x in outputs] == [expected_tokens([1] * 4, params, i) for i in range(6)]


def test_idle_pages_that_are_not_wanted_are_freed() -> None:
    evicted: list[tuple[int, bytes]] = []
    pool = PagePool(3, 2, lambda page, key: evicted.append((page, key)))
    pages = [pool.allocate(rank, reserved=False) for rank in (0, 0, 1, 1)]
    for page, key in zip(pages, (b"a", b"b", b"c", b"d"), strict=True):
        pool.register(page, key)
    pool.release(pages[1:])
    assert pool.evict(lambda key: key in (b"a", b"b", b"d")) == 2, "who is held stays"
    assert sorted(evicted) == sorted([(pages[1], b"b"), (pages[3], b"d")])
    assert [pool.find(key) is not None for key in (b"a", b"b", b"c", b"d")] == [True, False, True, False]
    assert (pool.num_evicted, pool.num_available, pool.evict(lambda key: False)) == (2, 5, 0)
    pool.release(pages[:1])
    assert pool.num_available == 6
