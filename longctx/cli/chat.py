"""`longctx chat`: a conversation with a model over one session of an engine."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from jax.sharding import Mesh

from longctx.cli import prompt_progress
from longctx.cli.arguments.engine import flag
from longctx.cli.chat_loop import COMMANDS, ChatLoop
from longctx.cli.conversation import Conversation
from longctx.cli.engine_flags import (
    LOWER,
    check_memory,
    given_topology,
    note_kernels,
    parallel_plan,
    plan_mesh,
    sampling_params,
)
from longctx.cli.files import check_prompt
from longctx.cli.line_reader import open_reader
from longctx.cli.terminal import Console, interrupts
from longctx.models import Llama, load_checkpoint, load_tokenizer, resolve_model
from longctx.models.checkpoint import read_model
from longctx.serving import Engine, EngineConfig, ParallelPlan

PAGE_SIZE = 64
_SHORT_TURN = 64  # rows of a step for a message of a sentence or two
_LOWER = LOWER | {"pages": "lower --max-length", "steps": "lower --chunk-size"}


def run(options: argparse.Namespace) -> int:
    for name, least in (("chunk_size", 1), ("max_length", 2)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"{flag(name)} must be at least {least}, got {value}")
    system = None if options.system is None else check_prompt("--system", options.system)
    sampling, plan = sampling_params(options), parallel_plan(options)
    console = Console(options.quiet)
    options.model = resolve_model(options.model, options.quiet)
    tokenizer = load_tokenizer(options.model)
    model, dtype = read_model(options.model, options.dtype)
    conversation = Conversation(tokenizer, frozenset((*tokenizer.eos_ids, *model.config.eos_ids)), system)
    conversation.ask("?")  # so that a template that refuses the system message does so now
    mesh = plan_mesh(plan)
    config = _config(options, console, model, plan, mesh, dtype)
    model, params = load_checkpoint(options.model, mesh, dtype)
    note_kernels(console, model, config, dtype)
    engine = Engine(model, params, config, mesh, tokenizer, plan=plan, topology=given_topology(options))
    prompt_progress.show_compiling(engine.compile, console, engine)

    history = None if options.no_history else _history_file()
    loop = ChatLoop(engine, conversation, sampling, console, open_reader(COMMANDS, history))
    interrupts.leave_to_python()
    return loop.run()


def _history_file() -> Path | None:
    """Where messages of earlier runs are kept; None: nowhere, as the user has no home."""
    try:
        return platformdirs.user_state_path("longctx") / "chat_history"
    except RuntimeError:
        return None


def _config(
    options: argparse.Namespace,
    console: Console,
    model: Llama,
    plan: ParallelPlan,
    mesh: Mesh | None,
    dtype: np.dtype[Any],
) -> EngineConfig:
    """Steps of three sizes, for decodes, short messages and files, and pages for one conversation.

    Of two over several context ranks, where every combination is a program.
    """
    context, wanted = model.config.max_positions, options.max_length
    if wanted is not None and wanted > context:
        raise ValueError(f"--max-length must be at most the model's context of {context}, got {wanted}")
    short = [_SHORT_TURN] if plan.context == 1 and options.chunk_size > _SHORT_TURN else []
    config = EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=None if wanted is None else -(-wanted // PAGE_SIZE),
        max_running=1,
        max_length=wanted or context,
        token_budget=options.chunk_size,
        buckets=tuple({1, options.chunk_size, *short}),
        max_logprobs=0,
        kv_dtype=options.kv_dtype,
    )
    num_pages = check_memory(console, model, config, plan, mesh, dtype, _LOWER)
    longest = min(wanted or context, num_pages * PAGE_SIZE * plan.context)
    if wanted is None and longest < context:
        console.note(f"context  {longest:,} tokens of the model's {context:,}: --max-length takes memory for more")
    return dataclasses.replace(config, num_pages=num_pages, max_length=longest)
