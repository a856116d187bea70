"""`longctx bench`: serve a workload on the engine, and measure how it was served."""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from longctx.cli.engine_flags import (
    add_engine_arguments,
    add_model_arguments,
    add_plan_arguments,
    add_scheduling_arguments,
    engine_config,
    flag,
    make_engine,
    parallel_plan,
)
from longctx.cli.process_flags import add_process_arguments, initialize_processes, make_parameter_mesh
from longctx.models import load_checkpoint, load_tokenizer
from longctx.serving import Engine, EngineStats, StepMetrics
from longctx.serving.distributed import ProcessGroup
from longctx.simulation import report
from longctx.simulation.record import Record
from longctx.simulation.replay import replay
from longctx.simulation.workloads import (
    Lengths,
    WorkloadRequest,
    arrive_at_rate,
    read_workload,
    scale_lengths,
    synthesize,
)

SUMMARY = "Serve a workload, from a file or synthetic, and measure TTFT, TPOT and tokens per second."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of random lengths, arrivals and tokens")

    workload = parser.add_argument_group("workload")
    workload.add_argument("--workload", type=Path, metavar="FILE", help="trace (JSON lines, or CSV of lengths)")
    workload.add_argument("--limit", type=int, metavar="N", help="only the first N requests of the file")
    workload.add_argument("--scale-lengths", type=float, metavar="X", help="all lengths of the file times X")
    workload.add_argument(
        "--requests", type=int, metavar="N", help="generate N requests instead of reading a file (16)"
    )
    workload.add_argument("--prompt-tokens", metavar="DIST", help="N, LOW:HIGH or LOW:HIGH:log (64:512)")
    workload.add_argument("--output-tokens", metavar="DIST", help="likewise (16:64)")
    workload.add_argument("--shared-prefix", type=int, metavar="N", help="further tokens that all prompts begin with")
    workload.add_argument("--rate", type=float, metavar="R", help="requests a second, Poisson; inf: all at once")
    workload.add_argument("--max-length", type=int, metavar="N", help="skip longer requests (prompt and output)")

    add_engine_arguments(parser)
    add_plan_arguments(parser)
    add_process_arguments(parser)
    add_scheduling_arguments(parser)

    results = parser.add_argument_group("results")
    results.add_argument("--json", type=Path, metavar="FILE", help="all figures, every request and step")
    results.add_argument("--plot", type=Path, metavar="FILE", help=".png or .svg: TTFT, TPOT, requests over time")


def run(options: argparse.Namespace) -> int:
    _check(options)
    with initialize_processes(options) as group:
        return _run(options, group)


def _run(options: argparse.Namespace, group: ProcessGroup) -> int:
    requests = _workload(options)
    mesh = make_parameter_mesh(options, parallel_plan(options), group)
    model, params = load_checkpoint(options.model, mesh, options.dtype)
    requests = _encode(requests, options.model)
    context = model.config.max_positions
    requests, num_skipped = _fitting(requests, options.max_length, context)
    longest = max(request.length for request in requests)

    config = engine_config(options, max_length=options.max_length or longest, seed=options.seed)
    steps: list[StepMetrics] = []
    engine = make_engine(options, model, params, config, mesh=mesh, monitor=steps.append, process_group=group)
    needed = -(-(longest - 1) // config.page_size)
    pages = engine.num_pages * engine.plan.context
    if needed > pages:
        raise ValueError(f"--num-pages must be at least {needed} for the longest request, got {pages}")
    if not group.is_first:
        engine.follow()
        return 0

    print("compiling ...", end="", file=sys.stderr, flush=True)
    start = time.monotonic()
    engine.warm_up()
    print(f" {time.monotonic() - start:.1f} s", file=sys.stderr)
    record = _replay(engine, requests, options.seed, steps)

    summary = report.summarize(record) | {"skipped": num_skipped}
    print(report.table(summary))
    if options.max_length is not None:
        print(
            f"skipped {num_skipped} of {num_skipped + len(requests)} requests, longer than {options.max_length} tokens"
        )
    if options.json is not None:
        settings = {"model": str(options.model), "workload": str(options.workload or "synthetic")}
        shown = dataclasses.asdict(config)
        del shown["hash_key"]
        plan = dataclasses.asdict(engine.plan)
        contents = settings | {"config": shown, "plan": plan, "summary": summary} | report.details(record)
        options.json.write_text(json.dumps(contents) + "\n", encoding="utf-8")
    if options.plot is not None:
        report.plot(record, options.plot)
    return 0


def _replay(engine: Engine, requests: Sequence[WorkloadRequest], seed: int, steps: list[StepMetrics]) -> Record:
    """Replay with progress bars of ended requests, and of tokens computed, found in the cache and generated."""
    total = sum(request.length for request in requests)
    with (
        tqdm(total=len(requests), desc="requests", unit="req", position=0) as ended,
        tqdm(total=total, desc="tokens", unit="tok", unit_scale=True, position=1) as tokens,
    ):

        def progress(record: Record, stats: EngineStats) -> None:
            done = stats.prompt_tokens + stats.cached_tokens + stats.output_tokens
            ended.update(len(record.served) - ended.n)
            tokens.update(max(0, min(done, total) - tokens.n))  # a preempted request is prefilled twice

        return replay(engine, requests, time.monotonic, seed=seed, progress=progress, steps=steps)


def _workload(options: argparse.Namespace) -> list[WorkloadRequest]:
    if options.workload is not None:
        requests = read_workload(options.workload, options.limit)
        if options.scale_lengths is not None:
            with _prefixed("--scale-lengths: "):
                requests = scale_lengths(requests, options.scale_lengths)
    else:
        with _prefixed("--prompt-tokens "):
            prompt_tokens = Lengths.parse(options.prompt_tokens or "64:512")
        with _prefixed("--output-tokens "):
            output_tokens = Lengths.parse(options.output_tokens or "16:64")
        num_requests = 16 if options.requests is None else options.requests
        requests = synthesize(num_requests, prompt_tokens, output_tokens, options.shared_prefix or 0, options.seed)
    return requests if options.rate is None else arrive_at_rate(requests, options.rate, options.seed)


def _encode(requests: list[WorkloadRequest], model: Path) -> list[WorkloadRequest]:
    """Encode the prompts that are text."""
    if not any(isinstance(request.prompt, str) for request in requests):
        return requests
    tokenizer = load_tokenizer(model)
    encoded = []
    for request in requests:
        if isinstance(request.prompt, str):
            tokens = tuple(tokenizer.encode(request.prompt))
            request = dataclasses.replace(request, prompt=tokens, prompt_tokens=len(tokens))
        encoded.append(request)
    return encoded


def _fitting(
    requests: list[WorkloadRequest], max_length: int | None, context: int
) -> tuple[list[WorkloadRequest], int]:
    """Split off longer requests: those of at most `max_length` tokens, and the number of the others."""
    if max_length is not None and max_length > context:
        raise ValueError(f"--max-length must be at most the model's context of {context}, got {max_length}")
    kept = [request for request in requests if request.length <= (max_length or context)]
    num_skipped = len(requests) - len(kept)
    longest = max(request.length for request in requests)
    if num_skipped and max_length is None:
        raise ValueError(
            f"{num_skipped} of {len(requests)} requests are longer than the model's context of {context} tokens "
            f"(the longest has {longest}): --max-length skips them, --scale-lengths shortens all"
        )
    if not kept:
        raise ValueError(f"--max-length {max_length} leaves no request")
    return kept, num_skipped


def _check(options: argparse.Namespace) -> None:
    synthetic = ("requests", "prompt_tokens", "output_tokens", "shared_prefix")
    from_file = ("limit", "scale_lengths")
    wrong = synthetic if options.workload is not None else from_file
    for name in wrong:
        if getattr(options, name) is not None:
            raise ValueError(f"{flag(name)} {'contradicts' if wrong is synthetic else 'needs'} --workload")
    for name, low in (("limit", 1), ("requests", 1), ("shared_prefix", 0), ("max_length", 2), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and value < low:
            raise ValueError(f"{flag(name)} must be at least {low}, got {value}")
    for name in ("scale_lengths", "rate"):
        value = getattr(options, name)
        if value is not None and not (value > 0 and (name == "rate" or math.isfinite(value))):
            raise ValueError(f"{flag(name)} must be above 0, got {value}")
    engine_config(options, max_length=options.max_length)
    if options.profile is not None and not options.profile.is_file():
        raise ValueError(f"--profile: no such file: {options.profile}")
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{flag(name)}: no such directory: {path.parent}")
    if options.plot is not None:
        with _prefixed("--plot "):
            report.check_can_plot(options.plot)


@contextmanager
def _prefixed(prefix: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None
