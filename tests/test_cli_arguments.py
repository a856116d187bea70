"""The flags: `--help` loads nothing heavy, and written defaults are those of the engine."""

import argparse
import dataclasses
import subprocess
import sys
from typing import get_args

from longctx.cli import COMMANDS
from longctx.cli.arguments import engine, sampling
from longctx.cli.engine_flags import engine_config, parallel_plan, sampling_params
from longctx.models.builtin import TINY
from longctx.serving import EngineConfig, ParallelPlan, SamplingParams
from longctx.serving.parallel_plan import EXCHANGES, PLACEMENTS

HEAVY = {"jax", "jaxlib", "numpy", "scipy", "jaxtyping", "einops", "safetensors", "tokenizers", "jinja2", "tqdm"}
HEAVY |= {"prompt_toolkit", "huggingface_hub", "gguf", "torch", "transformers", "zmq", "matplotlib", "asyncio"}


def test_help_loads_nothing_heavy() -> None:
    """Of the program and of each command; loading JAX alone takes more than a second."""
    program = f"""
import sys
from longctx.cli import COMMANDS, main

for arguments in [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]:
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0
    loaded = {HEAVY} & set(sys.modules)
    assert not loaded, (arguments, loaded)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(done.stdout.count(f"usage: longctx {name} ") == 1 for name in COMMANDS)


def test_defaults_are_those_of_the_engine() -> None:
    parser = argparse.ArgumentParser()
    engine.add_model_arguments(parser)
    engine.add_engine_arguments(parser)
    engine.add_scheduling_arguments(parser)
    engine.add_plan_arguments(parser)
    sampling.add_sampling_arguments(parser, max_tokens=SamplingParams().max_tokens)
    options = parser.parse_args([])
    assert options.model == TINY
    assert engine_config(options) == EngineConfig()
    assert parallel_plan(options) == ParallelPlan()
    assert dataclasses.replace(sampling_params(options), seed=None) == SamplingParams()


def test_choices_are_all_that_the_engine_takes() -> None:
    parser = argparse.ArgumentParser()
    engine.add_engine_arguments(parser)
    engine.add_plan_arguments(parser)
    choices = {action.dest: action.choices for action in parser._actions if action.choices}
    assert choices == {
        "admission": list(get_args(EngineConfig.__annotations__["admission"])),
        "exchange": list(EXCHANGES),
        "placement": list(PLACEMENTS),
    }
