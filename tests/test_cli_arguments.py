"""The flags: they follow from dataclasses, and `--help` loads nothing heavy."""

import argparse
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from longctx import cli
from longctx.cli import COMMANDS, command_flags, command_parser, vllm_flags
from longctx.cli.flags import Flags, add_flags, read
from longctx.cli.settings import engine_config, parallel_plan
from longctx.models.builtin import TINY
from longctx.serving import EngineConfig, ParallelPlan, SamplingParams, Slo
from longctx.serving.parallel_plan import EXCHANGES
from longctx.serving.scheduler.policy import POLICIES
from longctx.serving.validation import Range, check_fields

HEAVY = {"jax", "jaxlib", "numpy", "scipy", "jaxtyping", "einops", "safetensors", "tokenizers", "jinja2", "tqdm"}
HEAVY |= {"readline", "huggingface_hub", "gguf", "torch", "transformers", "zmq", "matplotlib", "asyncio"}


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
    environment = os.environ | {"COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert all(done.stdout.count(f"usage: longctx {name} ") == 1 for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_a_flag_is_and_its_default(name: str) -> None:
    flags = [action for action in command_flags(name) if action.option_strings]
    assert [action.dest for action in flags if not action.help] == []
    has_default = [action for action in flags if action.default not in (None, False, True, "", [], argparse.SUPPRESS)]
    assert [action.dest for action in has_default if "default" not in str(action.help)] == []


def test_defaults_are_those_of_the_engine() -> None:
    options = command_parser("bench").parse_args([])
    assert options.model == TINY
    assert engine_config(options) == EngineConfig()
    assert parallel_plan(options) == ParallelPlan()
    options = command_parser("generate").parse_args(["--prompt", "x"])
    drawn = SamplingParams(max_tokens=256, seed=0)
    assert read(SamplingParams, options) == drawn


def test_choices_are_all_that_the_engine_takes() -> None:
    help = {action.dest: action.help for action in command_flags("bench")}
    assert all(name in str(help["exchange"]) for name in EXCHANGES)
    assert all(name in str(help["policy"]) for name in POLICIES)


@dataclasses.dataclass(frozen=True)
class Knobs:
    """Settings of every kind.

    Attributes:
      size: rows. More about them.
      share: of a step.
      names: of things.
      mode: of work; None: slow.
      folder: of files. None: none.
      fast: go fast.
      safe: check all.
    """

    size: Annotated[int, Range(1, 8)] = 4
    share: float | None = 0.25
    names: tuple[str, ...] = ()
    mode: Literal["a", "b"] | None = None
    folder: Path | None = None
    fast: bool = False
    safe: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


def knobs(*arguments: str, **more: Any) -> Any:
    parser = argparse.ArgumentParser()
    add_flags(parser, [Flags(Knobs, "knobs", prefix="my_", **more)])
    return parser, read(Knobs, parser.parse_args(arguments))


def test_flags_follow_from_the_fields_of_a_dataclass() -> None:
    parser, made = knobs()
    assert made == Knobs()
    given = ["--my-size=8", "--my-name=x", "--my-name=y", "--my-mode=b", "--my-folder=f", "--my-fast", "--no-my-safe"]
    assert knobs(*given, "--my-share=0.5")[1] == Knobs(8, 0.5, ("x", "y"), "b", Path("f"), True, False)
    help = " ".join(parser.format_help().split())
    for line in (
        "--my-size N rows; 1 to 8; default: 4",
        "--my-share X of a step; default: 0.25",
        "--my-mode {a,b} of work; default: slow",
        "--my-folder PATH of files; default: none",
        "--my-name NAME of things; may be repeated",
    ):
        assert line in help
    with pytest.raises(ValueError, match=r"^--my-size must be an integer of 1 to 8, got 9$"):
        knobs("--my-size", "9")
    assert knobs("--size-of-it=2", names={"size": "size_of_it"}, defaults={"share": None})[1] == Knobs(2, None)


def parse(*arguments: str) -> argparse.Namespace:
    return cli.parse(["serve", *arguments])[1]


@pytest.mark.parametrize("name", ["medha", "sarathi", "meta"])
def test_presets_are_those_of_the_engine(name: str, tmp_path: Path) -> None:
    """They are overridden by the command line and a file."""
    usual = {"max_logprobs": 20}
    options = parse("--preset", name)
    assert engine_config(options) == getattr(EngineConfig, name)(**usual)
    assert parallel_plan(options) == getattr(ParallelPlan, name, ParallelPlan)()
    options = parse(
        "--preset", name, "--policy=srpf", "--token-budget", "256", "--context", "2", "--chunking=static:99"
    )
    changes = {"policy": "srpf", "token_budget": 256, "chunking": "static:99"} | usual
    assert engine_config(options) == dataclasses.replace(getattr(EngineConfig, name)(), **changes)
    assert parallel_plan(options) == dataclasses.replace(getattr(ParallelPlan, name, ParallelPlan)(), context=2)
    file = tmp_path / "flags.toml"
    file.write_text(f'preset = "{name}"\nchunking = "static:77"\n')
    assert engine_config(parse("--config", str(file))).chunking == "static:77"
    assert engine_config(parse("--config", str(file), "--chunking", "adaptive")).chunking == "adaptive"
    assert engine_config(parse("--config", str(file))).token_budget == getattr(EngineConfig, name)().token_budget


def test_every_target_has_a_flag() -> None:
    slo = Slo(ttft_factor=2, ttft_least=3, tpot=0.4, tpot_factor=5, step_seconds=0.6, tpot_scope="batch")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in dataclasses.asdict(slo).items()]
    assert engine_config(parse(*flags)).slo == slo


def test_what_is_no_preset() -> None:
    with pytest.raises(ValueError, match=r"^--preset: invalid choice: 'orca'"):
        parse("--preset", "orca")


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("--max-model-len 512", "max_length", 512),
        ("--max_model_len=512", "max_length", 512),
        ("--tensor-parallel-size 2", "tensor", 2),
        ("-tp 2 -pp=4", "stage", 4),
        ("--max-num-seqs 3", "max_running", 3),
        ("--max-num-batched-tokens 128", "token_budget", 128),
        ("--block-size 16", "page_size", 16),
        ("--num-gpu-blocks-override 9", "num_pages", 9),
        ("--kv-cache-dtype fp8", "kv_dtype", "float8_e4m3fn"),
        ("--kv-cache-dtype auto --dtype auto", "kv_dtype", None),
        ("--dtype half", "dtype", "float16"),
        ("--dtype=bfloat16", "dtype", "bfloat16"),
        ("--no-enable-prefix-caching", "prefix_cache", False),
        ("--enable-prefix-caching --enable-chunked-prefill --port 8001", "port", 8001),
        ("some/model --served-model-name gpt", "model", "some/model"),
        ("--tenant-weight a=2", "tenant_weights", [("a", 2.0)]),
    ],
)
def test_flags_of_vllm_serve_that_mean_the_same_are_read(given: str, name: str, value: object) -> None:
    assert getattr(parse(*given.split()), name) == value


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("--gpu-memory-utilization 0.9", "--gpu-memory-utilization is vLLM's: set XLA_PYTHON_CLIENT_MEM_FRACTION"),
        ("a-model --swap_space=4", "--swap_space is vLLM's: use --kv-host-bytes, such as 4GiB"),
        ("a-model --model another", "--model is given twice: the first argument, 'a-model', is a model too"),
        ("--max-model-len many", "--max-model-len: invalid int value: 'many'"),
        ("--kv-cache-dtype", "--kv-cache-dtype: expected one argument"),
        ("--dtype int8", "--dtype: invalid choice: 'int8'"),
        ("--enable-prefix-caching=yes", "unrecognized arguments: --enable-prefix-caching=yes"),
        ("--port 8000 a-model", "unrecognized arguments: a-model"),
    ],
)
def test_other_flags_of_vllm_serve_are_refused_with_what_to_use_here(given: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        parse(*given.split())


def test_errors_of_settings_name_the_flag_that_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--max-model-len", "0"]) == 2
    assert capsys.readouterr().err.startswith("longctx: --max-model-len must be an integer of at least 1")


def test_what_to_use_instead_names_flags_that_are_there() -> None:
    text = " ".join([*vllm_flags.SAME.values(), *vllm_flags.INSTEAD.values()])
    there = {option for action in command_flags("serve") for option in action.option_strings}
    assert {*re.findall(r"--[a-z-]+", text)} <= there
    assert not {*vllm_flags.SAME, *vllm_flags.INSTEAD, *vllm_flags.ALWAYS} & there
