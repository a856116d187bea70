"""Flags that several commands have: of the model, the engine, its devices and its scheduling.

Defaults are those of `EngineConfig`, `Slo` and `ParallelPlan`, which are written again here because importing these
takes a third of a second (a test compares them).
"""

import argparse
from pathlib import Path
from typing import Any

from longctx.models.builtin import TINY

MODEL = "checkpoint directory, .gguf file, or owner/name[@revision] of the Hugging Face hub"
ADMISSION = "when a request may begin: with room for all of its tokens, or for its prompt, and it may be preempted"

SIZES: dict[str, int | None] = {
    "page_size": 64,
    "num_pages": None,
    "max_running": 64,
    "token_budget": 512,
    "run_ahead": 2,
}
CHOICES: dict[str, Any] = {
    "admission": "reserve",
    "policy": "ilrs",
    "chunking": "adaptive",
    "max_share": 0.5,
    "kv_dtype": None,
}
SLO = {"ttft_factor": 5.0, "ttft_least": 1.0, "tpot": 0.2, "tpot_factor": 2.0, "step_seconds": 0.1}
PRESETS: dict[str, dict[str, Any]] = {
    "medha": {
        "policy": "ilrs",
        "chunking": "adaptive",
        "token_budget": 4096,
        "tpot": 0.03,
        "tpot_factor": 1.0,
        "step_seconds": 0.03,
        "placement": "grow",
        "exchange": "kvp",
    },
    "sarathi": {"policy": "fcfs", "chunking": "static", "token_budget": 512},
    "meta": {
        "policy": "fcfs",
        "chunking": "static",
        "token_budget": 32_768,
        "placement": "interleave",
        "exchange": "algorithm_1",
    },
}
"""Settings of the papers: those of `EngineConfig` and `ParallelPlan` of the same names."""


def flag(name: str) -> str:
    """The flag of an argument."""
    return f"--{name.replace('_', '-')}"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """`--model`, and `--dtype` of it and of its cache."""
    parser.add_argument("--model", metavar="MODEL", default=TINY, help=f"{MODEL}; default: the built-in one")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the checkpoint's own")
    add_kv_dtype_argument(parser)


def add_kv_dtype_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-dtype",
        choices=["float8_e4m3fn"],
        help="of the cache: twice the tokens in as much memory, and not exact; default: that of the model",
    )


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-compile-cache",
        action="store_true",
        help="don't keep compiled programs for the next run (they lie in the user's cache folder, or LONGCTX_CACHE)",
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    abouts = (
        "tokens of a page of the KV cache",
        "pages of the KV cache on each context rank",
        "sequences that run at a time, at most",
        "tokens of a step, at most",
        "steps in flight, at most",
    )
    for (name, default), about in zip(SIZES.items(), abouts, strict=True):
        engine.add_argument(
            flag(name), type=int, default=default, metavar="N", help=f"{about}; default: {default or 'what fits'}"
        )
    engine.add_argument("--buckets", metavar="N,N", help="numbers of rows of compiled steps; default: doubling from 8")
    engine.add_argument(
        "--admission",
        choices=["reserve", "optimistic"],
        default=CHOICES["admission"],
        help=f"{ADMISSION}; default: {CHOICES['admission']}",
    )
    engine.add_argument("--no-prefix-cache", action="store_true", help="share no pages")


def add_plan_arguments(parser: argparse.ArgumentParser, topology: str | None = None) -> None:
    """The plan and its topology; `topology`: the default one, None: it is found."""
    plan = parser.add_argument_group("devices")
    for name, about in (("stage", "sequence pipeline"), ("context", "ranks with pages"), ("tensor", "heads")):
        plan.add_argument(
            flag(name), type=int, default=1, metavar="N", help=f"devices along this axis: {about}; default: 1"
        )
    plan.add_argument(
        "--exchange",
        metavar="RULE",
        default="auto",
        help="exchange across --context: auto (the default), kvp, pass_q, pass_kv, all_gather, algorithm_1, "
        "algorithm_5, empirical or empirical:ALPHA,BETA,GAMMA",
    )
    plan.add_argument(
        "--placement",
        choices=["grow", "interleave"],
        default="grow",
        help="placement of pages over --context; default: grow",
    )
    plan.add_argument(
        "--rank-tokens", type=int, metavar="N", help="the most tokens of a request on one rank before it grows"
    )
    plan.add_argument(
        "--topology",
        metavar="NAME|FILE",
        default=topology,
        help="devices and links that costs are predicted from: h100-nvlink, h100-rdma, h100-tcp, a100-800g and others, "
        f"or a JSON file; default: {topology or 'found'}",
    )


def add_scheduling_arguments(parser: argparse.ArgumentParser) -> None:
    scheduling = parser.add_argument_group("scheduling")
    scheduling.add_argument(
        "--preset", choices=list(PRESETS), help="a paper's scheduling, placement and exchange; other flags come before"
    )
    scheduling.add_argument(
        "--policy", default=CHOICES["policy"], help="fcfs, edf, srpf, lrs, lrs_relative or ilrs (the default)"
    )
    scheduling.add_argument(
        "--chunking", default=CHOICES["chunking"], help="adaptive (the default), static or static:N"
    )
    scheduling.add_argument(
        "--max-share",
        type=float,
        default=CHOICES["max_share"],
        metavar="X",
        help=f"share of a step for short prompts, ilrs; default: {CHOICES['max_share']}",
    )
    abouts = (
        "TTFT target: times the prompt alone",
        "TTFT target: at least, seconds",
        "TPOT target, seconds",
        "TPOT target: at least, times a token alone",
        "of a step with adaptive chunks while nobody decodes",
    )
    for (name, default), about in zip(SLO.items(), abouts, strict=True):
        scheduling.add_argument(
            flag(name), type=float, default=default, metavar="X", help=f"{about}; default: {default}"
        )
    scheduling.add_argument(
        "--profile", type=Path, metavar="FILE", help="profile of this engine, from `longctx profile`"
    )
