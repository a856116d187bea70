"""Workloads made from flags, and files that their results are written to. Nothing here imports JAX."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.cli.flags import prefixing, refuse
from longctx.models import LlamaConfig, load_tokenizer
from longctx.models.validation import MAX_INT32
from longctx.simulation.models import MODELS
from longctx.simulation.record import Record
from longctx.simulation.reports import plots, report
from longctx.simulation.workloads import (
    Lengths,
    WorkloadRequest,
    arrive_at_rate,
    closed_loop,
    keep_requests,
    make_agent_sessions,
    read_workload,
    scale_lengths,
    synthesize,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SYNTHETIC = ("requests", "prompt_tokens", "output_tokens", "shared_prefix")
_FROM_FILE = ("limit", "scale_lengths")


def write_json(
    options: argparse.Namespace, settings: Mapping[str, Any], record: Record, summary: dict[str, Any]
) -> dict[str, Any]:
    """Write the file of `--json`, if it is given; returns what stands in it beside requests and steps."""
    agents = None if options.agents is None else f"{options.agents} sessions of agents"
    workload = str(options.workload or agents or getattr(options, "mix", None) or "synthetic")
    contents = {**settings, "workload": workload, "seed": options.seed, "summary": summary}
    if options.json is not None:
        options.json.write_text(json.dumps(contents | report.details(record)) + "\n", encoding="utf-8")
    return contents


def print_results(options: argparse.Namespace, summary: dict[str, Any], draw: Callable[[], "Figure"]) -> str:
    """Print the table of a run, and write the file of `--plot`; returns the table."""
    table = report.table(summary)
    print(table)
    if summary["skipped"]:
        print(f"skipped {summary['skipped']} requests, longer than {options.max_length} tokens")
    if options.plot is not None:
        plots.write_drawing(draw, options.plot)
    return table


def check_workload(options: argparse.Namespace) -> None:
    """Check that flags of a workload suit each other; ValueError names them."""
    if options.workload is not None:
        refuse(options, ("agents", *_SYNTHETIC), "contradicts --workload")
    elif options.agents is not None:
        refuse(options, (*_SYNTHETIC, "limit"), "contradicts --agents")
    else:
        refuse(options, _FROM_FILE, "needs --workload")
    if getattr(options, "users", None) is not None:
        names = ("rate", *(("jitter",) if hasattr(options, "jitter") else ()))
        refuse(options, names, "contradicts --users: users wait for answers")


def make_workload(options: argparse.Namespace, config: LlamaConfig) -> tuple[list[WorkloadRequest], int]:
    """The requests that a model can serve, all of token ids, and how many `--max-length` leaves out."""
    requests = tokenise(read_requests(options), options.model, config.vocab_size)
    requests, num_skipped = keep_fitting(requests, options, config.max_positions)
    return loop_users(requests, options), num_skipped


def read_requests(options: argparse.Namespace) -> list[WorkloadRequest]:
    """The requests of a file, or synthetic ones, and when they come."""
    if options.workload is not None or options.agents is not None:
        if options.workload is not None:
            requests = read_workload(options.workload, options.limit)
        else:
            requests = make_agent_sessions(options.agents, seed=options.seed)
        if options.scale_lengths is not None:
            with prefixing("--scale-lengths: "):
                requests = scale_lengths(requests, options.scale_lengths)
    else:
        prompt_tokens = _lengths("--prompt-tokens", options.prompt_tokens or "64:512")
        output_tokens = _lengths("--output-tokens", options.output_tokens or "16:64")
        num_requests = 16 if options.requests is None else options.requests
        requests = synthesize(num_requests, prompt_tokens, output_tokens, options.shared_prefix or 0, options.seed)
    return requests if options.rate is None else arrive_at_rate(requests, options.rate, options.seed)


def loop_users(requests: list[WorkloadRequest], options: argparse.Namespace) -> list[WorkloadRequest]:
    """Return the requests as the users of `--users` send them, or as they are."""
    if options.users is None:
        return requests
    with prefixing("--users: "):
        return closed_loop(requests, options.users)


def _lengths(name: str, text: str) -> Lengths:
    with prefixing(f"{name} "):
        lengths = Lengths.parse(text)
    if lengths.high > MAX_INT32:
        raise ValueError(f"{name} must be at most {MAX_INT32}, got {text}")
    return lengths


def tokenise(requests: list[WorkloadRequest], model: Path, vocab_size: int) -> list[WorkloadRequest]:
    """Encode the prompts that are text, and check those that are token ids."""
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
    """Split off requests that are longer than `--max-length`: the others, and the number of those."""
    max_length = options.max_length
    has_lengths = options.workload is None and options.agents is None
    shorter = "--prompt-tokens and --output-tokens" if has_lengths else "--scale-lengths"
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


def named_model(text: str) -> LlamaConfig:
    """A model by its name, or that of a folder's `config.json`."""
    if text in MODELS:
        return MODELS[text]
    path = Path(text)
    if (path / "config.json").is_file():
        with prefixing("--model: "):
            return LlamaConfig.from_hf(path / "config.json")
    raise ValueError(f"--model must be one of {', '.join(MODELS)}, or a folder with config.json, got {text!r}")
