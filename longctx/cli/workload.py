"""Workloads made from flags, and files that their results are written to. Nothing here imports JAX."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx import extras
from longctx.cli.files import check_input, check_output
from longctx.cli.flags import flag, prefixing
from longctx.models import LlamaConfig, load_tokenizer
from longctx.models.validation import MAX_INT32
from longctx.plotting import can_draw
from longctx.simulation.record import Record
from longctx.simulation.reports import html_report, plots, report
from longctx.simulation.workloads import (
    Lengths,
    WorkloadRequest,
    arrive_at_rate,
    keep_requests,
    read_workload,
    scale_lengths,
    synthesize,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIN_RATE = 1e-6  # requests a second
_SYNTHETIC = ("requests", "prompt_tokens", "output_tokens", "shared_prefix")
_FROM_FILE = ("limit", "scale_lengths")


def check_outputs(options: argparse.Namespace, *names: str) -> None:
    """Check that the files of such flags, of which `plot` is a drawing, can be written; ValueError, with the flag."""
    for name in names:
        path = getattr(options, name)
        if path is not None:
            check_output(flag(name), path)
    if options.plot is not None:
        with prefixing("--plot "):
            plots.check_can_plot(options.plot)


def write_results(
    options: argparse.Namespace,
    settings: Mapping[str, Any],
    record: Record,
    summary: dict[str, Any],
    draw: Callable[[], "Figure"],
) -> None:
    """Print the table of a simulation, and write the files of `--json`, `--plot` and `--out`."""
    printed, contents = report.table(summary), {**settings, "seed": options.seed, "summary": summary}
    contents["workload"] = str(options.workload or options.mix or "synthetic")
    print(printed)
    if summary["skipped"]:
        print(f"skipped {summary['skipped']} requests, longer than {options.max_length} tokens")
    if options.json is not None:
        options.json.write_text(json.dumps(contents | report.details(record)) + "\n", encoding="utf-8")
    if options.plot is not None:
        plots.write_drawing(draw, options.plot)
    if options.out is not None:
        html_report.write_report(contents, record, printed, plots.write_drawings(draw, options.out), options.out)
        print_where(options.out)


def print_where(out: Path) -> None:
    """Print where the report of `--out` is, and how to install what would draw in it, if that is missing."""
    lacking = "" if can_draw() else f", without drawings: {extras.pip_line('plot')}"
    print(f"written to {out / 'report.html'}{lacking}")


def check_folder(options: argparse.Namespace) -> None:
    """Check that `--out` can be a folder, and make it; ValueError if it can't."""
    if options.out is not None:
        if options.out.exists() and not options.out.is_dir():
            raise ValueError(f"--out must be a folder, and {options.out} is a file")
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out: no folder can be made at {options.out}: {error.strerror}") from None


def check_workload(options: argparse.Namespace) -> None:
    """Check the flags alone; ValueError, with the flag."""
    wrong = _SYNTHETIC if options.workload is not None else _FROM_FILE
    for name in wrong:
        if getattr(options, name) is not None:
            raise ValueError(f"{flag(name)} {'contradicts' if wrong is _SYNTHETIC else 'needs'} --workload")
    if options.rate is not None and not options.rate >= MIN_RATE:
        raise ValueError(f"--rate must be at least {MIN_RATE}, got {options.rate}")
    if options.workload is not None:
        check_input("--workload", options.workload)


def make_workload(options: argparse.Namespace, config: LlamaConfig) -> tuple[list[WorkloadRequest], int]:
    """The requests that a model can serve, all of token ids, and how many `--max-length` leaves out.

    Raises:
      ValueError: the file is none, or a request can't be served.
    """
    requests = tokenise(read_requests(options), options.model, config.vocab_size)
    return keep_fitting(requests, options, config.max_positions)


def read_requests(options: argparse.Namespace) -> list[WorkloadRequest]:
    """The requests of a file, or synthetic ones, and when they come.

    Raises:
      ValueError: the file is none, or a flag has no value that it can have.
    """
    if options.workload is not None:
        requests = read_workload(options.workload, options.limit)
        if options.scale_lengths is not None:
            with prefixing("--scale-lengths: "):
                requests = scale_lengths(requests, options.scale_lengths)
    else:
        prompt_tokens = _lengths("--prompt-tokens", options.prompt_tokens or "64:512")
        output_tokens = _lengths("--output-tokens", options.output_tokens or "16:64")
        num_requests = 16 if options.requests is None else options.requests
        requests = synthesize(num_requests, prompt_tokens, output_tokens, options.shared_prefix or 0, options.seed)
    return requests if options.rate is None else arrive_at_rate(requests, options.rate, options.seed)


def _lengths(name: str, text: str) -> Lengths:
    with prefixing(f"{name} "):
        lengths = Lengths.parse(text)
    if lengths.high > MAX_INT32:
        raise ValueError(f"{name} must be at most {MAX_INT32}, got {text}")
    return lengths


def tokenise(requests: list[WorkloadRequest], model: Path, vocab_size: int) -> list[WorkloadRequest]:
    """Encode the prompts that are text, and check those that are token ids.

    Raises:
      ValueError: a token is not of the vocabulary.
    """
    if all(request.prompt is None for request in requests):
        return requests
    tokenizer = load_tokenizer(model) if any(isinstance(request.prompt, str) for request in requests) else None
    tokenised = []
    for request in requests:
        tokens = request.prompt
        if isinstance(tokens, str):
            assert tokenizer is not None
            tokens = tuple(tokenizer.encode(tokens))
            request = dataclasses.replace(request, prompt=tokens, prompt_tokens=len(tokens))
        if tokens is not None and max(tokens) >= vocab_size:
            raise ValueError(
                f"--workload: prompt of request {request.number + 1} must be of tokens 0 to {vocab_size - 1}, the "
                f"model's vocabulary, got {max(tokens)}"
            )
        tokenised.append(request)
    return tokenised


def keep_fitting(
    requests: list[WorkloadRequest], options: argparse.Namespace, context: int
) -> tuple[list[WorkloadRequest], int]:
    """Split off requests that are longer than `--max-length`: the others, and the number of those.

    Raises:
      ValueError: one is longer than the model's context, and there is no such flag, or it leaves none.
    """
    max_length = options.max_length
    shorter = "--prompt-tokens and --output-tokens" if options.workload is None else "--scale-lengths"
    if max_length is not None and max_length > context:
        raise ValueError(f"--max-length must be at most the model's context of {context}, got {max_length}")
    kept = keep_requests(requests, lambda request: request.length <= (max_length or context))
    num_skipped = len(requests) - len(kept)
    longest = max(request.length for request in requests)
    if num_skipped and max_length is None:
        raise ValueError(
            f"{num_skipped} of {len(requests)} requests are longer than the model's context of {context} tokens "
            f"(the longest has {longest}): --max-length skips them, {shorter} can make all shorter"
        )
    if not kept:
        raise ValueError(f"--max-length {max_length} leaves no request")
    return kept, num_skipped
