"""`longctx replay --model`: the recorded requests computed again on the model, and their tokens compared."""

import argparse
import dataclasses
from pathlib import Path

from longctx.cli import compile_cache
from longctx.cli.commands import AXES
from longctx.cli.engine import describe_kernels, plan_mesh, show_compiling
from longctx.cli.flags import flag, naming
from longctx.cli.terminal import FAILED, Console, report_error
from longctx.models import Llama, Tokenizer, checkpoint_fingerprint, load_checkpoint, load_tokenizer, resolve_model
from longctx.models.params import Params
from longctx.serving import Engine, EngineConfig, ParallelPlan, SamplingParams
from longctx.serving.engine.model_replay import Mismatch, ModelReplay, replay_on_plan
from longctx.serving.recording.header import Header
from longctx.serving.recording.reader import RecordedLog
from longctx.simulation.incident.replayer import recorded_requests

TIE = 1e-4
"""Tokens agree where the logits of the two are closer than this: other shapes round otherwise."""


def replay_on_model(log: RecordedLog, options: argparse.Namespace, console: Console) -> int:
    """Compute the tokens again: as recorded, step by step, or on another plan; the exit status."""
    header = log.header
    compile_cache.enable(not options.compiles_anew)
    if header.is_private:
        raise ValueError(f"--model: {log.directory} is private: it has no tokens, and only decisions can be replayed")
    path = resolve_model(options.model, options.quiet)
    axes = {axis: getattr(options, axis) for axis in AXES}
    with naming(AXES):
        plan = dataclasses.replace(header.plan, **{axis: size for axis, size in axes.items() if size is not None})
    mesh = plan_mesh(plan)
    model, params = load_checkpoint(path, mesh, options.dtype or header.dtype)
    if model.config != header.model:
        raise ValueError(f"--model: {path} is of another shape than the recorded model, {header.model_name}")
    if header.weights is not None and checkpoint_fingerprint(path) != header.weights:
        console.note(f"weights  of {path} are not those of the recorded model, {header.model_name}")
    console.note(describe_kernels(model, header.config, params["embed"].dtype))
    tokenizer = _load_tokenizer(path)
    if plan == header.plan:
        replay = ModelReplay(log, model, params, mesh, tokenizer)
        show_compiling(replay.compile, console)
        steps, mismatch = replay.run()
        if mismatch is None:
            print(f"replayed {steps:,} steps on {options.model}: every decision and every token is the same")
            return 0
        return _report(mismatch, _gap(mismatch, model, params, header, plan, tokenizer))
    requests = recorded_requests(log)
    compared, mismatches = replay_on_plan(header, plan, requests, model, params, mesh, tokenizer)
    ties = 0
    for mismatch in mismatches:
        gap = _gap(mismatch, model, params, header, plan, tokenizer)
        if gap is None or gap >= TIE:
            return _report(mismatch, gap)
        ties += 1
    sizes = " ".join(f"{flag(axis)} {getattr(plan, axis)}" for axis in axes)
    print(
        f"replayed {compared:,} completions on {options.model}, {sizes}: all tokens are the same, but for {ties} ties"
    )
    return 0


def _load_tokenizer(path: Path) -> Tokenizer | None:
    """None where there is none: then no request had stop strings, or that is an error."""
    try:
        return load_tokenizer(path)
    except FileNotFoundError:
        return None


def _report(mismatch: Mismatch, gap: float | None) -> int:
    text = f"{mismatch}{'' if gap is None else f'; their logits are {gap:.2g} apart'}"
    if gap is not None and gap < TIE:
        print(f"replayed until a tie: {text}")
        return 0
    return report_error(text, FAILED)


def _gap(
    mismatch: Mismatch, model: Llama, params: Params, header: Header, plan: ParallelPlan, tokenizer: Tokenizer | None
) -> float | None:
    """Return the gap of the two best logits where tokens differ; None where more than they decide."""
    if mismatch.sampling.temperature > 0 or mismatch.sampling.has_penalties:
        return None
    size = header.config.page_size
    config = EngineConfig(
        page_size=size,
        num_pages=-(-(len(mismatch.before) + 1) // size),
        max_running=1,
        max_length=len(mismatch.before) + 1,
        token_budget=header.config.token_budget,
        prefix_cache=False,
        max_logprobs=2,
        kv_dtype=header.config.kv_dtype,
    )
    engine = Engine(model, params, config, tokenizer=tokenizer, plan=plan)
    (output,) = engine.generate([mismatch.before], SamplingParams(max_tokens=1, logprobs=2))
    assert output.logprobs is not None
    (_, best), (_, second) = output.logprobs[0].top
    return best - second
