"""Engines on fake devices that are recorded, and their replays."""

import dataclasses
from pathlib import Path

import numpy as np
from fake_device import VOCAB, FakeExecutor, model_with

from longctx.models import ByteTokenizer
from longctx.serving import Engine, EngineConfig, Output, ParallelPlan, Request, SamplingParams
from longctx.serving.distributed import ProcessGroup
from longctx.serving.executor.interface import Executor
from longctx.serving.recording.log import RecordedLog
from longctx.serving.recording.recorder import Recorder
from longctx.simulation.incident.baseline import Baseline
from longctx.simulation.incident.replayer import Replayer


def recorded_engine(
    recorder: Recorder | None,
    plan: ParallelPlan | None = None,
    num_pages: int = 24,
    group: ProcessGroup | None = None,
    executor: Executor | None = None,
    window: int | None = None,
    **options: object,
) -> Engine:
    """An engine in virtual time, with a tokenizer, whose tokens are bytes."""
    options = {"page_size": 4, "max_running": 6, "token_budget": 16} | options
    config = EngineConfig(num_pages=num_pages, **options)  # type: ignore[arg-type]
    plan = plan or ParallelPlan()
    clock = executor = executor or FakeExecutor(config, plan, num_pages, window=window)
    return Engine(
        model_with(window),
        None,
        config,
        tokenizer=ByteTokenizer(),
        executor=executor,
        clock=clock.clock,  # type: ignore[attr-defined]
        plan=plan,
        process_group=group,
        recorder=recorder,
    )


def random_request(rng: np.random.Generator, documents: list[list[int]], number: int) -> Request:
    """With all that decisions may depend on: common prefixes, several completions, sessions, ends of all kinds."""
    completions = int(rng.choice([1, 1, 1, 2, 3]))
    session = f"session-{rng.integers(2)}" if completions == 1 and rng.random() < 0.3 else None
    prompt = documents[rng.integers(3)][: rng.integers(1, 40)] + rng.integers(0, VOCAB, rng.integers(0, 9)).tolist()
    sampling = SamplingParams(
        max_tokens=int(rng.integers(1, 20)),
        temperature=1.0 if completions > 1 or rng.random() < 0.5 else 0.0,
        seed=int(rng.integers(1000)) if rng.random() < 0.5 else None,
        n=completions,
        stop=("\x05", "\x11\x12") if rng.random() < 0.3 else (),
        stop_token_ids=(9, 13) if rng.random() < 0.2 else (),
        ignore_eos=bool(rng.random() < 0.3),
        prompt_logprobs=1 if rng.random() < 0.1 else None,
    )
    return Request(
        prompt,
        sampling,
        request_id=f"r{number}",
        session_id=session,
        tenant=str(rng.integers(2)),
        ttft_deadline=float(rng.choice([1e-3, 1.0])) if rng.random() < 0.3 else None,
        tpot_target=float(rng.choice([1e-3, 1.0])) if rng.random() < 0.3 else None,
        priority=int(rng.choice([0, 0, 0, 1, 2])),
    )


def drive(engine: Engine, seed: int, acts: int = 150) -> list[Output]:
    """Random requests, cancels and steps until all have ended; a session's turn goes on with the one before it."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, VOCAB, 60).tolist() for _ in range(3)]
    turns: dict[str, list[int]] = {}
    requests: dict[str, Request] = {}
    outputs: list[Output] = []

    def step() -> None:
        for event in engine.step():
            if event.output is not None:
                outputs.append(event.output)
                request = requests[event.request_id]
                if request.session_id is not None:
                    turns[request.session_id] = [*request.prompt, *event.output.token_ids]  # type: ignore[misc]

    for number in range(acts):
        choice = rng.random()
        if choice < 0.2:
            request = random_request(rng, documents, number)
            before = turns.get(request.session_id or "", [])
            if not engine.config.prefix_cache:
                request = dataclasses.replace(request, session_id=None)
            elif len(before) < 28:
                request = dataclasses.replace(request, prompt=[*before, *request.prompt])
            requests[engine.submit(request)] = request
        elif choice < 0.23 and requests:
            engine.cancel(str(rng.choice(sorted(requests))))
        else:
            step()
    while engine.has_work:
        step()
    return outputs


def replay(directory: Path) -> Baseline:
    """Replay a log to its end."""
    baseline = Baseline(Replayer(RecordedLog(directory)))
    baseline.run()
    return baseline


def summary(outputs: list[Output]) -> list[object]:
    """What a replay has to find out too: all but tokens and text."""
    rows = [(x.request_id, x.index, len(x.token_ids), x.finish_reason, x.metrics) for x in outputs]
    return sorted(rows, key=lambda row: row[:2])
