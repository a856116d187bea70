"""Checks before the first step that the engines of all processes are configured alike."""

import dataclasses
import hashlib
import os
import re

from jax.sharding import Mesh

from longctx.models import Llama, Tokenizer
from longctx.models.params import Params
from longctx.parallel.topology import Topology
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
    topology: Topology,
) -> tuple[EngineConfig, int]:
    """Check that the engines of all processes are alike.

    Returns:
      The configuration with a hash key that all processes share, and the smallest of their numbers of pages.

    Raises:
      ValueError: they are not; the message lists the differences.
    """
    settings = dataclasses.asdict(config)
    secret = settings.pop("hash_key")
    if not isinstance(config.policy, str):
        attributes = repr(sorted(getattr(config.policy, "__dict__", {}).items()))
        settings["policy"] = [type(config.policy).__qualname__, re.sub(r" at 0x[0-9a-f]+", "", attributes)]
    group.agree(
        "engine",
        settings
        | {f"plan.{name}": value for name, value in dataclasses.asdict(plan).items()}
        | {f"model.{name}": value for name, value in dataclasses.asdict(model.config).items()}
        | {
            "dtype": None if params is None else str(params["embed"].dtype),
            "predictor": None if predictor is None else [predictor.seconds(work) for work in _probes(config)],
            "devices": None if mesh is None else [device.id for device in mesh.devices.flat],
            "tokenizer": None if tokenizer is None else [type(tokenizer).__name__, *sorted(tokenizer.eos_ids)],
            "max_length": max_length,
            "topology": topology.to_dict(),
            "hash_key": None if secret is None else hashlib.blake2b(secret).hexdigest(),
        },
    )
    gathered = group.gather("pages", [num_pages, os.urandom(32).hex()])
    secret = bytes.fromhex(gathered[0][1]) if secret is None else secret
    return dataclasses.replace(config, hash_key=secret), min(pages for pages, _ in gathered)


def _probes(config: EngineConfig) -> list[Work]:
    """Steps on which predictors are compared: one of each number of rows, with and without context."""
    return [Work().with_chunk(start, rows, True) for rows in config.row_buckets for start in (0, 4096)]
