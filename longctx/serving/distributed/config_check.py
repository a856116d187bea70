"""Checks that the engines of all processes are configured alike before they begin."""

import dataclasses
import hashlib
import os

from jax.sharding import Mesh

from longctx.models import Llama, Tokenizer
from longctx.models.params import Params
from longctx.serving.config import EngineConfig
from longctx.serving.distributed.process_group import ProcessGroup
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.predictor.work import Work


def check_config(
    group: ProcessGroup,
    model: Llama,
    params: Params | None,
    config: EngineConfig,
    plan: ParallelPlan,
    mesh: Mesh | None,
    predictor: Predictor | None,
    tokenizer: Tokenizer | None,
    max_length: int,
    num_pages: int,
) -> tuple[EngineConfig, int]:
    """Check that the engines of all processes are alike; returns the configuration with one secret for all, and pages.

    Raises:
      ValueError: they are not, with what differs.
    """
    settings = dataclasses.asdict(config)
    secret = settings.pop("hash_key")
    if not isinstance(config.policy, str):
        # Not `repr`, which may have an address.
        settings["policy"] = [type(config.policy).__qualname__, repr(sorted(vars(config.policy).items()))]
    group.agree(
        "engine",
        settings
        | {f"plan.{name}": value for name, value in dataclasses.asdict(plan).items()}
        | {f"model.{name}": value for name, value in dataclasses.asdict(model.config).items()}
        | {
            "dtype": None if params is None else str(params["embed"].dtype),
            "predictor": None if predictor is None else [predictor.seconds(work) for work in _works(config)],
            "devices": None if mesh is None else [device.id for device in mesh.devices.flat],
            "tokenizer": None if tokenizer is None else [type(tokenizer).__name__, *sorted(tokenizer.eos_ids)],
            "max_length": max_length,
            "hash_key": None if secret is None else hashlib.blake2b(secret).hexdigest(),
        },
    )
    told = group.gather("pages", [num_pages, os.urandom(32).hex()])
    secret = bytes.fromhex(told[0][1]) if secret is None else secret
    return dataclasses.replace(config, hash_key=secret), min(pages for pages, _ in told)


def _works(config: EngineConfig) -> list[Work]:
    """Some steps: of each number of rows, with and without context."""
    return [Work().with_chunk(start, rows, True) for rows in config.row_buckets for start in (0, 4096)]
