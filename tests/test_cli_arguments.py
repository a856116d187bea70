"""The flags: `--help` loads nothing heavy, and written defaults are those of the engine."""

import argparse
import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from longctx.cli import COMMANDS, _parse
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


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_a_flag_is_and_its_default(name: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"longctx.cli.arguments.{name.replace('-', '_')}").add_arguments(parser)
    flags = [action for action in parser._actions if action.option_strings]
    assert [action.dest for action in flags if not action.help] == []
    has_default = [action for action in flags if action.default not in (None, False, "", [], argparse.SUPPRESS)]
    assert [action.dest for action in has_default if "default" not in str(action.help)] == []


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
        "placement": list(PLACEMENTS),
    }
    about = next(action.help for action in parser._actions if action.dest == "exchange")
    assert about
    assert all(name in about for name in EXCHANGES)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sub = parser.add_subparsers().add_parser("serve")
    for add in (engine.add_engine_arguments, engine.add_plan_arguments, engine.add_scheduling_arguments):
        add(sub)
    sub.add_argument("--config", type=Path)
    return _parse(parser, {"serve": sub}, ["serve", *arguments])


@pytest.mark.parametrize("name", engine.PRESETS)
def test_presets_are_those_of_the_engine(name: str, tmp_path: Path) -> None:
    """What the command line or a file says comes before them."""
    options = parse("--preset", name)
    assert engine_config(options) == getattr(EngineConfig, name)()
    assert parallel_plan(options) == getattr(ParallelPlan, name, ParallelPlan)()
    options = parse(
        "--preset", name, "--policy=srpf", "--token-budget", "256", "--context", "2", "--chunking=static:99"
    )
    changes = {"policy": "srpf", "token_budget": 256, "chunking": "static:99"}
    assert engine_config(options) == dataclasses.replace(getattr(EngineConfig, name)(), **changes)
    assert parallel_plan(options) == dataclasses.replace(getattr(ParallelPlan, name, ParallelPlan)(), context=2)
    file = tmp_path / "flags.toml"
    file.write_text(f'preset = "{name}"\nchunking = "static:77"\n')
    assert engine_config(parse("--config", str(file))).chunking == "static:77"
    assert engine_config(parse("--config", str(file), "--chunking", "adaptive")).chunking == "adaptive"
    assert engine_config(parse("--config", str(file))).token_budget == getattr(EngineConfig, name)().token_budget


def test_what_is_no_preset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--preset", "orca")
    assert "--preset: invalid choice: 'orca'" in capsys.readouterr().err
