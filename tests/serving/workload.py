"""`Workload`: runs random requests, cancels and steps on an engine, and checks every event."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from fake_device import EOS, VOCAB, expected_tokens

from longctx.serving import Engine, Event, Request, SamplingParams

Oracle = Callable[[list[int], SamplingParams, int, int], list[int]]
"""`oracle(prompt, params, index of the completion, end token) -> expected tokens`"""

Follows = Callable[[list[int], list[int], SamplingParams, int], list[bool]]
"""`follows(tokens, prompt, params, index of the completion)`: which tokens are those expected after the ones before."""


class Workload:
    """Random requests, cancels and steps on one engine; every event is checked as it comes.

    Args:
      prime: is told, before the oracle is asked, what tokens probably are right, and how many of them the prompt has.
    """

    def __init__(
        self,
        engine: Engine,
        seed: int,
        oracle: Oracle = expected_tokens,
        follows: Follows | None = None,
        prime: Callable[[list[int], int], object] = lambda tokens, first: None,
    ) -> None:
        self.engine, self.rng, self.oracle = engine, np.random.default_rng(seed), oracle
        self.prime, self.follows, self.drawn = prime, follows, list[bool]()
        self.open: dict[str, Request] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: Counter[tuple[str, int]] = Counter()
        self.conversations: dict[str, list[int]] = {}
        self.documents = [self.rng.integers(0, VOCAB, 60).tolist() for _ in range(3)]
        self.cancelled: set[str] = set()
        self.num_requests = 0
        self._changes = np.random.default_rng((seed, 1))  # of logits: apart, for the sake of seeds that tests rely on

    def submit(self) -> None:
        rng = self.rng
        completions = int(rng.choice([1, 1, 1, 2, 3]))
        prompt = (
            self.documents[rng.integers(3)][: rng.integers(1, 40)] + rng.integers(0, VOCAB, rng.integers(0, 9)).tolist()
        )
        prompt = [int(t) for t in prompt] or [1]
        session = None
        if completions == 1 and self.engine.config.prefix_cache and rng.random() < 0.3:
            session = f"session-{rng.integers(2)}"
            before = self.conversations.get(session, [])
            prompt = before + prompt if len(before) < 60 else prompt
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 20)),
            temperature=1.0 if completions > 1 else 0.0,
            seed=int(rng.integers(1000)),
            n=completions,
            ignore_eos=bool(rng.random() < 0.3),
            **self.draw_changes(),
        )
        request = Request(
            prompt,
            params,
            request_id=f"r{self.num_requests}",
            session_id=session,
            tenant=str(rng.integers(2)),
            cache_salt=str(self._changes.choice(["", "", "", "salt"])),
            ttft_deadline=float(rng.choice([1e-3, 1.0])) if rng.random() < 0.3 else None,
            tpot_target=float(rng.choice([1e-3, 1.0])) if rng.random() < 0.3 else None,
            priority=int(rng.choice([0, 0, 0, 1, 2])),
        )
        self.num_requests += 1
        self.engine.submit(request)
        self.open[f"r{self.num_requests - 1}"] = request

    def draw_changes(self) -> dict[str, Any]:
        """What changes a request's logits, mostly nothing; dyadic numbers, so that nothing is rounded."""
        rng, changes = self._changes, dict[str, Any]()
        if rng.random() < 0.2:
            changes["frequency_penalty"] = float(rng.integers(-16, 17) / 8)
        if rng.random() < 0.2:
            tokens = rng.permutation(VOCAB)[: rng.integers(1, VOCAB + 1)].tolist()
            changes["logit_bias"] = tuple((token, float(rng.integers(-16, 17) / 4)) for token in tokens)
        return changes

    def cancel(self) -> None:
        if self.open:
            request_id = str(self.rng.choice(sorted(self.open)))
            self.cancelled.add(request_id)
            assert self.engine.cancel(request_id)
            self.check_events(self.engine.step())

    def step(self) -> None:
        self.check_events(self.engine.step())
        self.check_scheduler()

    def check_events(self, events: list[Event]) -> None:
        for event in events:
            at = event.request_id, event.index
            request = self.open.get(event.request_id)
            assert request is not None or event.request_id in self.cancelled
            assert not self.ends[at], "an event after the end"
            self.tokens.setdefault(at, []).extend(event.token_ids)
            if event.output is not None:
                self.ends[at] += 1
                self.check_output(at, event)

    def check_output(self, at: tuple[str, int], event: Event) -> None:
        request, output = self.open[at[0]], event.output
        assert output is not None
        assert output.token_ids == self.tokens[at]
        if self.follows is not None:
            self.drawn += self.follows(output.token_ids, list(request.prompt), request.sampling, at[1])
        expected = self.expected(request, at[1], output.token_ids)
        if output.finish_reason == "cancelled":
            assert at[0] in self.cancelled
            assert output.token_ids == expected[: len(output.token_ids)]
        else:
            assert output.token_ids == expected
        if request.session_id is not None:
            self.conversations[request.session_id] = list(request.prompt) + output.token_ids
        if sum(self.ends[at[0], i] for i in range(request.sampling.n)) == request.sampling.n:
            del self.open[at[0]]

    def expected(self, request: Request, completion: int, tokens: list[int]) -> list[int]:
        """What a request's tokens should be; with `follows`, which has checked them, how far they should go."""
        if self.follows is None:
            self.prime([*request.prompt, *tokens], len(request.prompt))
            return self.oracle(list(request.prompt), request.sampling, completion, EOS)
        ends = [at for at, token in enumerate(tokens, 1) if token == EOS and not request.sampling.ignore_eos]
        length = min([*ends, request.sampling.max_tokens])
        return tokens[:length] + [EOS] * (length - len(tokens))

    def check_scheduler(self) -> None:
        """Check that pages, promises and slots in use are exactly those of the running sequences."""
        scheduler = self.engine.scheduler
        running = list(scheduler.running)
        held = Counter(page for sequence in running for page in sequence.pages)
        pool = scheduler.pool
        assert pool.num_held == len(held)
        assert all(pool.is_held_alone(page) == (count == 1) for page, count in held.items())
        assert pool.reserved == [sum(s.reserved[rank] for s in running) for rank in range(pool.num_ranks)]
        free = scheduler.running.slots
        slots = [s.slot for s in running] + free.free + [slot for _, slot in free.draining]
        assert sorted(slots) == list(range(self.engine.config.max_running))
        assert pool.num_available + pool.num_reserved + len(held) == pool.num_pages
        for sequence in running:
            on = [pool.rank_of(page) for page in sequence.pages]
            assert sequence.ranks == tuple(sorted({*on}))
            assert sequence.rank_pages == [on.count(rank) for rank in range(pool.num_ranks)]

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()
        assert not self.open
        assert not self.drawn or np.mean(self.drawn) > 0.8
        assert set(self.ends.values()) <= {1}
        pool = self.engine.scheduler.pool
        assert pool.num_held == pool.num_reserved == 0
        assert pool.num_available == pool.num_pages
        pool.clear()
        assert pool.num_cached == 0
        assert pool.num_available == pool.num_pages

    def run(self, events: int) -> None:
        self.act(events)
        self.finish()

    def act(self, events: int) -> None:
        for _ in range(events):
            choice = self.rng.random()
            if choice < 0.2 and len(self.open) < 20:
                self.submit()
            elif choice < 0.23:
                self.cancel()
            else:
                self.step()
