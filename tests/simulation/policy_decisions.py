"""What each policy decides on three small traces: `python -m tests.simulation.policy_decisions --write`.

The core that serves replays a trace in virtual time. Every step is kept as a line of text and a few digits of the
digest of all decisions so far, which covers slots, pages and ranks too. Nothing here depends on the machine: tokens are
counted, not drawn; the key of the page hashes is fixed; seconds of steps are sums of powers of two, so that no order of
summation can round them otherwise.
"""

import argparse
import itertools
import json
from collections import deque
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longctx.models.config import LlamaConfig
from longctx.serving.config import EngineConfig
from longctx.serving.distributed.digest import DecisionDigest
from longctx.serving.engine.build import build_core
from longctx.serving.engine.core import run_step
from longctx.serving.executor.submit_queue import SubmitQueue
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor import RuntimePredictor
from longctx.serving.request.output import Metrics
from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.policy import POLICIES
from longctx.serving.scheduler.sequence import Sequence
from longctx.serving.scheduler.slo import Slo
from longctx.simulation.instance.virtual_executor import VirtualExecutor
from longctx.simulation.workloads import WorkloadRequest, read_workload

HERE = Path(__file__).parent
STORED = HERE / "policy_decisions.json"
REWRITE = "python -m tests.simulation.policy_decisions --write"
MODEL = LlamaConfig(1 << 20, 64, 128, 4, 4, 4, 16, max_positions=10_000)
_BLOCK = 4096  # token ids from which the tokens of each block, and the own ones of each request, count on
_DIGITS = 4  # of the digest after each step


class Case(NamedTuple):
    """How a trace is served: what its policies have to deal with."""

    config: dict[str, Any]
    plan: ParallelPlan = ParallelPlan()


CASES = {
    "short_mixed": Case({"num_pages": 64, "max_running": 8}),
    "long_and_short": Case(
        {"num_pages": 96, "max_running": 8, "chunking": "adaptive"},
        ParallelPlan(stage=2, context=2, exchange="kvp", rank_tokens=2048),
    ),
    "shared_prefixes": Case({"num_pages": 26, "max_running": 8, "admission": "optimistic"}),
}
PREDICTOR = RuntimePredictor.of_rows(
    {rows: 2**-9 + rows * 2**-15 for rows in (8, 16, 32, 64, 128, 256)}, (1, 64), (2**-22, 2**-20), 2**-16
)


def device_seconds(batch: Batch) -> float:
    """What a batch takes: not what is predicted, so that predictions are corrected."""
    return PREDICTOR.seconds(batch.work) * (1.25 if batch.work.chunks else 1.5)


def make_config(case: Case, policy: str) -> EngineConfig:
    slo = Slo(ttft_least=2**-5, tpot=2**-5, tpot_factor=1.0, step_seconds=2**-5)
    settings = {"chunking": "static"} | case.config
    return EngineConfig(token_budget=256, policy=policy, slo=slo, hash_key=bytes(16), **settings)


def make_request(request: WorkloadRequest, number: int) -> Request:
    """Its tokens count on from a multiple of `_BLOCK`: equal blocks have equal ones, and no others are equal."""
    missing, parts = request.prompt_tokens, []
    for block in request.blocks:
        parts.append(np.arange(min(missing, request.block_size)) + block * _BLOCK)
        missing -= len(parts[-1])
    parts.append(np.arange(missing) + (128 + number) * _BLOCK)
    tokens = np.concatenate(parts).tolist()
    return Request(tokens, SamplingParams(max_tokens=request.output_tokens, ignore_eos=True), str(number))


class Decisions:
    """A log of decisions: a line for each step; steps that only decode what the one before did share its line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._digest = DecisionDigest()
        self._last, self._count = "", 0

    def note_plan(self, batch: Batch) -> None:
        self._digest.add_plan(batch)
        text = describe(batch)
        if text == self._last and "prefill" not in text and "admit" not in text:
            self._count += 1
            self.lines.pop()
        else:
            self._last, self._count = text, 1
        times = f" ({self._count} steps)" if self._count > 1 else ""
        self.lines.append(f"{self._digest.digest.hex()[:_DIGITS]} {batch.index}: {text}{times}")

    def note_draw(self, batch: Batch, tokens: List[int]) -> None:
        pass


def describe(batch: Batch) -> str:
    """Requests by number: who decodes, who prefills how many tokens after which, who is admitted and who is blocked."""
    decodes = [chunk.sequence.order for chunk in batch.chunks if chunk.decodes]
    prompts = [(chunk.sequence.order, chunk) for chunk in batch.chunks if not chunk.decodes]
    parts = {
        "decode": _spans(decodes),
        "prefill": ", ".join(f"{order} {chunk.start}+{chunk.num_tokens}{_at(chunk.ranks)}" for order, chunk in prompts),
        "admit": " ".join(str(sequence.order) for sequence in batch.admitted),
        "blocked": " ".join(str(sequence.order) for sequence in batch.blocked),
    }
    return "; ".join(f"{name} {text}" for name, text in parts.items() if text) or "idle"


def _at(ranks: tuple[int, ...]) -> str:
    return "" if ranks == (0,) else f" @{','.join(map(str, ranks))}"


def _spans(orders: list[int]) -> str:
    """Numbers, where consecutive ones are written as `3-7`."""
    spans: list[list[int]] = []
    for order in orders:
        if spans and spans[-1][-1] + 1 == order:
            spans[-1].append(order)
        else:
            spans.append([order])
    return " ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)


def decide(name: str, policy: str) -> dict[str, Any]:
    """Serve a trace under a policy; figures and decisions as plain data, times in seconds."""
    case = CASES[name]
    requests = read_workload(HERE / "traces" / f"{name}.jsonl")
    config = make_config(case, policy)
    core, inputs, maker = build_core(MODEL, config, case.plan, PREDICTOR, config.num_pages or 0, MODEL.max_positions)
    executor = VirtualExecutor(device_seconds, MODEL.vocab_size, case.plan.stage)
    queue = SubmitQueue(executor, executor.clock, case.plan.stage)
    log, due, open_ = Decisions(), deque(enumerate(requests)), dict[str, list[Sequence]]()
    metrics: list[Metrics] = []
    while due or open_:
        while due and due[0][1].arrival <= executor.now:
            number, request = due.popleft()
            prepared = inputs.prepare(make_request(request, number))
            open_[str(number)] = maker.make(prepared, str(number), request.arrival)
            core.add(open_[str(number)])
        step = run_step(core, queue, executor.now, [log])
        if step is None:
            executor.now = max(executor.now, due[0][1].arrival)
            continue
        for event in core.end(step.batch, step.results, step.finished, step.seconds):
            if event.output is not None:
                metrics.append(event.output.metrics)
                del open_[event.request_id]
    stats = core.stats()
    return {
        "figures": {
            **_summarize("ttft", [m.ttft for m in metrics if m.ttft is not None]),
            **_summarize("tpot", [m.tpot for m in metrics if m.tpot is not None]),
            "seconds": float(f"{executor.now:.6g}"),
            "steps": stats.steps,
            "preemptions": stats.preemptions,
            "cached_tokens": stats.cached_tokens,
        },
        "decisions": log.lines,
    }


def _summarize(name: str, values: list[float]) -> dict[str, float]:
    """The mean and the 90th percentile (of the order statistics the next one up), of six digits."""
    ordered = sorted(values)
    p90 = ordered[-(-9 * len(ordered) // 10) - 1]
    return {f"{name}_mean": float(f"{sum(ordered) / len(ordered):.6g}"), f"{name}_p90": float(f"{p90:.6g}")}


def difference(stored: dict[str, Any], found: dict[str, Any]) -> str | None:
    """The first decision that differs, with the one before it, or else the figures; None: all is equal."""
    before = "  (nothing)"
    for old, new in itertools.zip_longest(stored["decisions"], found["decisions"], fillvalue="(no more steps)"):
        if old != new:
            same = old.partition(" ")[2] == new.partition(" ")[2]
            why = "  the same rows: slots, pages, ranks or the end of equal steps differ" if same else ""
            return "\n".join(filter(None, [f"  after   {before}", f"  stored  {old}", f"  now     {new}", why]))
        before = old
    changed = [
        f"  {name}: stored {stored['figures'].get(name)}, now {value}"
        for name, value in found["figures"].items()
        if value != stored["figures"].get(name)
    ]
    return "\n".join(["  the decisions are the same, but not the times:", *changed]) if changed else None


def decide_all() -> dict[str, dict[str, Any]]:
    return {name: {policy: decide(name, policy) for policy in POLICIES} for name in CASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--write", action="store_true", help=f"rewrite {STORED.name}")
    options = parser.parse_args()
    found = decide_all()
    if options.write:
        STORED.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    for name, policies in found.items():
        print(f"{name}")
        for policy, result in policies.items():
            print(f"  {policy:<13}", *(f"{key} {value}" for key, value in result["figures"].items()), sep="  ")


if __name__ == "__main__":
    main()
