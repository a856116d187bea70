"""Our GPU kernels at every named shape against cuDNN, XLA and torch, in one run: `python -m benchmarks.kernels`.

Operands are random and rotate through more than L2 holds; contenders take turns; medians of rounds of many passes with
one wait each. Every result is checked once against float32, after NaN was put where it will lie. `--model` prints
instead, on any machine, the least that an H100 needs and what the kernels' machine code is predicted to take.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import kernel_cases as cases_of
from benchmarks import kernel_model
from benchmarks.h100_limits import floor_rows, floor_table
from benchmarks.kernel_cases import Case, Operands
from benchmarks.kernel_contenders import Contender, Prepared, applicable, our_contenders, peers
from benchmarks.kernel_report import Result, environment, report, to_json
from benchmarks.kernel_shapes import AttentionShape, select

MAX_PASSES = 200


def check(
    case: Case, operands: Operands, prepared: Prepared, outs: object, expected: dict[object, list[np.ndarray]]
) -> float:
    """The relative error of a pass. What is expected is computed once for all contenders that compute the same."""
    key = prepared.causal, prepared.page_size
    got = prepared.first(outs)
    if case.backward:
        if key not in expected:
            expected[key] = cases_of.expected_gradients(case, operands)
        arrays = [np.asarray(cases_of.last_group(case, x)[0].astype(jnp.float32)) for x in got]
        pairs = zip(arrays, expected[key], strict=True)
        return max(cases_of.relative_error(x, y, block=64) for x, y in pairs)
    if key not in expected:
        expected[key] = cases_of.expected_rows(case, operands, *key)
    rows = jnp.asarray(cases_of.rows_to_check(case))
    arrays = [np.asarray(got[0][entry, rows].astype(jnp.float32)) for entry in cases_of.entries_to_check(case)]
    return max(cases_of.relative_error(x, y) for x, y in zip(arrays, expected[key], strict=True))


def reason_of(error: Exception) -> str:
    message = (str(error).strip().splitlines() or [""])[0][:200]
    return message if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {message}"


def prepare(
    case: Case, sets: list[Operands], contenders: dict[str, Contender], results: dict[str, Result]
) -> dict[str, tuple[Prepared, float]]:
    """The contenders that are right, with the seconds of a first pass; `results` gets the reasons of the others."""
    ready: dict[str, tuple[Prepared, float]] = {}
    expected: dict[object, list[np.ndarray]] = {}
    for name, contender in contenders.items():
        result, prepared, outs = results[name], None, None
        try:
            prepared = contender(case, sets)
            prepared.wait(prepared.start())  # compiles
            prepared.poison()
            start = time.perf_counter()
            outs = prepared.start()
            prepared.wait(outs)
            seconds = time.perf_counter() - start
            result.error = check(case, sets[0], prepared, outs, expected)
            if result.failed:
                result.reason = f"FAILED: a relative error of {result.error:.1e}, over {cases_of.MAX_ERROR}"
            else:
                ready[name] = prepared, seconds
        except Exception as error:  # a peer may fail in any way: the table says in which
            result.reason = reason_of(error)
    return ready


def take_turns(
    ready: dict[str, tuple[Prepared, float]], budget: float, rounds: int, results: dict[str, Result]
) -> dict[str, list[float]]:
    """Seconds of a pass in each round. A slow contender has fewer rounds, at least one."""
    times: dict[str, list[float]] = {name: [] for name in ready}
    share = budget / max(1, len(ready))
    for _ in range(rounds):
        for name, (prepared, estimate) in ready.items():
            passes = int(np.clip(share / rounds / estimate, 1, MAX_PASSES))
            if results[name].reason or sum(times[name]) * passes > 2 * share:
                continue
            results[name].passes = passes
            try:
                start = time.perf_counter()
                for _ in range(passes):
                    outs = prepared.start()
                prepared.wait(outs)
                times[name].append((time.perf_counter() - start) / passes)
            except Exception as error:
                results[name].reason = reason_of(error)
            outs = None
    return times


def run_case(
    case: Case, contenders: dict[str, Contender], budget: float, rounds: int, num_sets: int | None = None
) -> list[Result]:
    """In about `budget` seconds beside compilation and checks."""
    sets = jax.block_until_ready(cases_of.make_operands(case, num_sets or cases_of.num_sets(case)))
    results = {name: Result(case, name) for name in contenders}
    ready = prepare(case, sets, contenders, results)
    for name, seconds in take_turns(ready, budget, rounds, results).items():
        if not results[name].reason:
            results[name].ms = statistics.median(seconds) / len(sets) * 1e3
            results[name].rounds = len(seconds)
    return list(results.values())


def run(
    cases: Sequence[Case],
    contenders: dict[str, Contender],
    budget: float,
    rounds: int,
    deadline: float = float("inf"),
    memory: float = float("inf"),
    num_sets: int | None = None,
    progress: Callable[[str], object] = lambda line: None,
) -> list[Result]:
    """All cases in turn. One that doesn't fit into memory, or comes after the deadline, has a reason and no times."""
    results: list[Result] = []
    for case in cases:
        needed = cases_of.needed_bytes(case)
        if needed > memory:
            results.append(Result(case, "", reason=f"left out: over the {memory / 1e9:.0f} GB of memory"))
        elif time.monotonic() > deadline:
            results.append(Result(case, "", reason="left out: the time was up (--minutes)"))
        else:
            start = time.monotonic()
            try:
                of_case = run_case(case, applicable(case, contenders), budget, rounds, num_sets)
            except Exception as error:  # operands that don't fit
                of_case = [Result(case, "", reason=reason_of(error))]
            results += of_case
            times = ", ".join(f"{r.contender} {r.ms:.3f}" if r.ms else f"{r.contender} -" for r in of_case)
            progress(f"{case.name}, ms: {times} ({time.monotonic() - start:.0f} s)")
    return results


def copy_bytes_per_second(num_elements: int, rounds: int, passes: int = 10) -> float:
    """Bytes read and written by a copy of that many bf16."""
    x = jax.random.normal(jax.random.key(0), (num_elements,)).astype(jnp.bfloat16)
    copy = jax.jit(jnp.copy)
    jax.block_until_ready(copy(x))
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(passes):
            out = copy(x)
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - start) / passes)
    return 2 * x.nbytes / statistics.median(seconds)


def model(shapes: list[AttentionShape]) -> tuple[str, str]:
    """The floors of shapes and, where the tools for them are, predictions: as markdown and as JSON."""
    rows, notes = floor_rows(shapes), []
    if needed := kernel_model.missing():
        notes.append(f"Predictions need {needed}.")
    else:
        try:
            rows = [row | x.row for row, x in zip(rows, kernel_model.predict_all(shapes), strict=True)]
            peer, ours = (rate / 1e12 for rate in kernel_model.ablation())
            notes.append(
                "Predictions come from machine code, not from a GPU. At the shape of FlashAttention-3's ablation\n"
                f"the model says {peer:.0f} TFLOP/s of JAX's kernel (published without pipelining: 582, with which\n"
                f"its clock is calibrated) and {ours:.0f} of ours (published with pipelining: 661)."
            )
        except RuntimeError as error:
            notes.append(f"No predictions: {error}")
    return "\n\n".join([floor_table(rows), *notes]), json.dumps(rows, indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="store_true", help="print floors and predictions; needs no GPU")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases by name, as in llama3-70b/tp8/*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of measuring a case, beside compilation")
    parser.add_argument("--minutes", type=float, default=8.0, help="cases that come later are left out, and listed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * arguments.minutes
    shapes, cases = select(arguments.only), cases_of.all_cases(arguments.only)
    if not (shapes if arguments.model else cases):
        parser.error(f"--only: nothing is called {arguments.only}")
    if arguments.model:
        text, data = model(shapes)
    elif jax.default_backend() != "gpu":
        print(f"benchmarks.kernels needs a GPU, found {jax.default_backend()}; --model needs none", file=sys.stderr)
        return 2
    else:
        copy = copy_bytes_per_second(2**31 - 2**20, arguments.rounds)
        memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))
        contenders = our_contenders() | peers()

        def progress(line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        results = run(cases, contenders, arguments.budget, arguments.rounds, deadline, memory, progress=progress)
        text, data = report(results, copy, environment()), to_json(results, copy, environment())
    print(text)
    for file, content in ((arguments.json, data), (arguments.markdown, text)):
        if file:
            file.write_text(content + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
