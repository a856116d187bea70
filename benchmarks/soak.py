"""Random use of an engine from eight threads: `python -m benchmarks.soak --engine [DIR] --minutes M --plan S,C,T`.

The threads generate, stream, abandon streams, cancel, and hold conversations, as fast as they can; one of them submits
and steps. Then it checks, and exits with status 1 if something is wrong, that

- every completion ended once, and the tokens of its events are those of its output;
- every page is back, nothing runs or waits, and no request is left in memory;
- every answer equals that of the same request alone in an engine without a prefix cache, up to a difference where the
  two best logits are closer than 1e-4; what a cancelled request got is the beginning of it.

The most memory that the process had may have grown by a tenth, and 64 MiB, since a quarter of the time had passed.
"""

import argparse
import gc
import json
import random
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from longctx.models import Llama, load_checkpoint
from longctx.models.builtin import TINY
from longctx.models.params import Params
from longctx.parallel import make_mesh
from longctx.serving import Engine, EngineConfig, Event, Output, ParallelPlan, Request, SamplingParams
from longctx.serving.engine.active_request import ActiveRequest
from longctx.serving.scheduler.sequence import Sequence

Answer = tuple[tuple[int, ...], SamplingParams, int]
"""What the tokens of a completion depend on: prompt, sampling, and the index of the completion."""

SIZES = {"page_size": 16, "num_pages": 48, "max_running": 6, "token_budget": 32, "buckets": (8, 32), "max_length": 320}


class Soak:
    """Random use of an engine.

    Args:
      vocab: prompts have tokens below it.
      longest: tokens of the longest prompt.

    Attributes:
      answers: the different tokens that each completion got.
      beginnings: those of completions that were cancelled.
      wrong: sentences on what should not have happened.
    """

    def __init__(self, engine: Engine, vocab: int, seed: int, longest: int = 200) -> None:
        self.engine, self.seed = engine, seed
        rng = random.Random(seed)
        documents = [[rng.randrange(vocab) for _ in range(longest)] for _ in range(4)]
        self.prompts = [rng.choice(documents)[: rng.randrange(1, longest)] for _ in range(24)]
        self.sampling = [
            SamplingParams(max_tokens=12, ignore_eos=True),
            SamplingParams(max_tokens=5),
            SamplingParams(max_tokens=9, temperature=0.9, seed=1, n=3),
            SamplingParams(max_tokens=20, temperature=1.2, top_p=0.9, seed=2, repetition_penalty=1.2),
        ]
        self.longest = longest
        self.answers: dict[Answer, set[tuple[int, ...]]] = {}
        self.beginnings: dict[Answer, set[tuple[int, ...]]] = {}
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._numbers = iter(range(10**9))
        self._before = _count_objects()  # of other engines in this process

    def run(self, seconds: float, threads: int = 8) -> None:
        """Use the engine from so many threads, the first of which submits and steps."""
        deadline = time.monotonic() + seconds
        workers = [threading.Thread(target=self._work, args=(n, deadline), daemon=True) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=max(0.0, deadline - time.monotonic()) + 300)
            if worker.is_alive():
                self.wrong.append(f"{worker.name} has not ended 300 s after the deadline")

    def _work(self, number: int, deadline: float) -> None:
        rng = random.Random(f"{self.seed}/{number}")
        actions: list[Callable[[random.Random], None]] = [
            *[self._generate] * 3,
            *[self._stream] * 2,
            *[self._abandon] * 2,
            self._cancel_stream,
            self._converse,
        ]
        try:
            while time.monotonic() < deadline:
                (self._submit_and_step if number == 0 else rng.choice(actions))(rng)
        except BaseException as error:
            self.wrong.append(f"thread {number}: {type(error).__name__}: {error}")
            raise

    def _request(self, rng: random.Random) -> Request:
        prompt = rng.choice(self.prompts)
        return Request(
            prompt, rng.choice(self.sampling), request_id=f"r{next(self._numbers)}", priority=rng.choice([0, 0, 1])
        )

    def _generate(self, rng: random.Random) -> None:
        requests = [self._request(rng) for _ in range(rng.randrange(1, 4))]
        outputs = self.engine.generate(requests)
        ids = [(request.request_id, n) for request in requests for n in range(request.sampling.n)]
        if [(output.request_id, output.index) for output in outputs] != ids:
            self.wrong.append(f"generate of {ids} returned others: {outputs}")
        for request in requests:
            self._note(request, [output for output in outputs if output.request_id == request.request_id])

    def _stream(self, rng: random.Random) -> None:
        request = self._request(rng)
        self._note_events(request, self.engine.stream(request))

    def _abandon(self, rng: random.Random) -> None:
        """Leave a stream after some events, closed or dropped."""
        request = self._request(rng)
        stream = self.engine.stream(request)
        for _, _event in zip(range(rng.randrange(0, 12)), stream, strict=False):
            pass
        if rng.random() < 0.5:
            stream.close()
        self.counts["abandoned"] += 1

    def _cancel_stream(self, rng: random.Random) -> None:
        request, after = self._request(rng), rng.randrange(0, 8)
        events = []
        for i, event in enumerate(stream := self.engine.stream(request)):
            events.append(event)
            if i == after:
                self.engine.cancel(str(request.request_id))
        self._note_events(request, [*events, *stream])

    def _converse(self, rng: random.Random) -> None:
        session, prompt = f"s{rng.randrange(8)}", rng.choice(self.prompts)[:20]
        while len(prompt) < self.longest - 20:
            request = Request(prompt, self.sampling[0], request_id=f"r{next(self._numbers)}", session_id=session)
            outputs = self.engine.generate(request)
            self._note(request, outputs)
            prompt = [*prompt, *outputs[0].token_ids, *self.prompts[0][:9]]

    def _submit_and_step(self, rng: random.Random) -> None:
        requests = {request.request_id: request for request in (self._request(rng) for _ in range(4))}
        events: dict[str | None, list[Event]] = {name: [] for name in requests}
        for request in requests.values():
            self.engine.submit(request)
        victim = rng.choice([None, *requests])
        num_open = sum(request.sampling.n for request in requests.values())
        while num_open:
            for event in self.engine.step():
                events[event.request_id].append(event)
                num_open -= event.output is not None
            if victim is not None and rng.random() < 0.2:
                self.engine.cancel(victim)
            if not 0 <= self.engine.stats().running <= self.engine.config.max_running:
                self.wrong.append(f"stats: {self.engine.stats()}")
        for name, request in requests.items():
            self._note_events(request, events[name])

    def _note_events(self, request: Request, events: Iterable[Event]) -> None:
        tokens: dict[int, list[int]] = {}
        outputs: list[Output] = []
        for event in events:
            if any(output.index == event.index for output in outputs):
                self.wrong.append(f"an event of {request.request_id}/{event.index} after its last")
            tokens.setdefault(event.index, []).extend(event.token_ids)
            if event.output is not None:
                outputs.append(event.output)
                if event.output.token_ids != tokens[event.index]:
                    self.wrong.append(f"events of {request.request_id} bring {tokens}, its output {event.output}")
        self._note(request, outputs)

    def _note(self, request: Request, outputs: list[Output]) -> None:
        if sorted(output.index for output in outputs) != list(range(request.sampling.n)):
            self.wrong.append(f"{request} ended as {outputs}")
        with self._lock:
            for output in outputs:
                self.counts[output.finish_reason] += 1
                found = self.beginnings if output.finish_reason == "cancelled" else self.answers
                answer = tuple(request.prompt), request.sampling, output.index
                found.setdefault(answer, set()).add(tuple(output.token_ids))  # type: ignore[arg-type]

    def check_idle(self) -> None:
        """Check that the engine, without requests, holds nothing."""
        while self.engine.has_work:
            self.engine.step()
        stats = self.engine.stats()
        if (stats.running, stats.waiting, stats.pages_held) != (0, 0, 0):
            self.wrong.append(f"the idle engine holds something: {stats}")
        left = _count_objects() - self._before
        # The last batch of each stage stays until the next one comes.
        if left["ActiveRequest"] or left["Sequence"] > self.engine.plan.stage * self.engine.config.max_running:
            self.wrong.append(f"objects of requests that have ended are in memory: {dict(left)}")

    def check_answers(
        self,
        alone: Callable[[list[int], SamplingParams], list[list[int]]],
        is_tie: Callable[[list[int], SamplingParams, list[int], list[int]], bool] = lambda *_: False,
    ) -> None:
        """Compare all answers with those that `alone` gives to a prompt and its sampling, a list for each completion.

        `is_tie` says of (prompt, sampling, tokens, expected tokens) whether their difference is one of rounding.
        """
        expected: dict[tuple[tuple[int, ...], SamplingParams], list[list[int]]] = {}
        for prompt, sampling, index in tqdm({**self.answers, **self.beginnings}, "alone", disable=None):
            if (prompt, sampling) not in expected:
                expected[prompt, sampling] = alone(list(prompt), sampling)
            whole = expected[prompt, sampling][index]
            key = prompt, sampling, index
            pairs = [(list(tokens), whole) for tokens in self.answers.get(key, ())]
            pairs += [(list(tokens), whole[: len(tokens)]) for tokens in self.beginnings.get(key, ())]
            for tokens, right in pairs:
                self.counts["compared"] += 1
                if tokens == right:
                    continue
                if is_tie(list(prompt), sampling, tokens, right):
                    self.counts["ties"] += 1
                else:
                    self.wrong.append(f"{key} got {tokens}, and alone {right}")


def _count_objects() -> Counter[str]:
    """How many objects of requests are in memory."""
    gc.collect()
    return Counter(type(x).__name__ for x in gc.get_objects() if type(x) in (ActiveRequest, Sequence))


def peak_memory() -> float:
    """The most memory that the process has had so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def make_is_tie(model: Llama, params: Params) -> Callable[..., bool]:
    def is_tie(prompt: list[int], sampling: SamplingParams, tokens: list[int], expected: list[int]) -> bool:
        at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), None)
        if sampling.temperature or at is None:
            return False
        second, best = np.sort(np.asarray(model(params, np.array([*prompt, *expected[:at]])))[-1])[-2:]
        return bool(best - second < 1e-4)

    return is_tie


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engine", nargs="?", type=Path, const=TINY, default=TINY, metavar="DIR", help="its checkpoint"
    )
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--plan", default="1,1,1", metavar="STAGE,CONTEXT,TENSOR")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    plan = ParallelPlan(*map(int, options.plan.split(",")))
    if plan.num_devices > 1:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", plan.num_devices)
    mesh = make_mesh(plan.stage, plan.context, plan.tensor) if plan.num_devices > 1 else None
    model, params = load_checkpoint(options.engine, mesh)
    # On a mesh there are fewer programs to compile.
    settings: dict[str, Any] = SIZES if mesh is None else SIZES | {"token_budget": 16, "buckets": (16,)}
    engine = Engine(model, params, EngineConfig(**settings), mesh, plan=plan)
    if mesh is None:
        engine.warm_up()  # on a mesh the first requests compile what they need

    soak = Soak(engine, model.config.vocab_size, options.seed)
    soak.run(15 * options.minutes)
    early = peak_memory()
    soak.run(45 * options.minutes)
    late = peak_memory()
    soak.check_idle()
    stats = engine.stats()
    del engine, soak.engine
    single = Engine(model, params, EngineConfig(**(settings | {"prefix_cache": False})), mesh, plan=plan)
    soak.check_answers(
        lambda prompt, sampling: [output.token_ids for output in single.generate([prompt], sampling)],
        make_is_tie(*load_checkpoint(options.engine)),
    )
    print(json.dumps({"plan": options.plan, **dict(soak.counts), "steps": stats.steps, "preempted": stats.preemptions}))
    print(f"most memory: {early:.0f} MiB after a quarter of the time, {late:.0f} MiB at the end")
    if late > 1.1 * early + 64:
        soak.wrong.append("memory grows")
    for sentence in soak.wrong[:20]:
        print("WRONG:", sentence)
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
