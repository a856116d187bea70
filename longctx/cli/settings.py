"""Settings of engines that are made from flags, without any device. Nothing here imports JAX."""

import argparse
from pathlib import Path
from typing import Any

from longctx.cli.flags import read, refuse
from longctx.parallel.topology import AXES, Topology
from longctx.serving.config import EngineConfig
from longctx.serving.kv_cache.encryption import disk_key
from longctx.serving.kv_cache.secret import make_secret, read_kv_secret
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.scheduler.slo import Slo


def engine_config(options: argparse.Namespace, **more: Any) -> EngineConfig:
    """Make the configuration from the flags; errors name the flags."""
    if Slo in options.fields:
        more["slo"] = read(Slo, options)
    return read(EngineConfig, options, **more)


def parallel_plan(options: argparse.Namespace) -> ParallelPlan:
    """Make the parallel plan from the flags; errors name the flags."""
    plan = read(ParallelPlan, options)
    topology = given_topology(options)
    if topology is not None:  # now, before weights are loaded
        topology.check(**{axis: getattr(plan, axis) for axis in AXES})
    return plan


def given_topology(options: argparse.Namespace) -> Topology | None:
    """Return the topology of `--topology`; None: it is to be found."""
    text = getattr(options, "topology", None)
    return None if text is None else Topology.named(text)


def tier_config(options: argparse.Namespace) -> TierConfig | None:
    """Make the settings of tiers from the flags; None: there are none. Errors name the flags."""
    if options.kv_host_bytes is None:
        why = "needs --kv-host-bytes: pages go there by host memory"
        refuse(options, ("kv_disk", "kv_disk_bytes", "kv_disk_key_file", "kv_store"), why)
        return None
    if options.kv_disk is None:
        refuse(options, ("kv_disk_key_file",), "needs --kv-disk: host memory is not encrypted")
    config = read(TierConfig, options, **({"disk_bytes": 0} if options.kv_disk_bytes is None else {}))
    if config.disk_key_file is not None:
        disk_key(config.disk_key_file, "--kv-disk-key-file")  # before weights are loaded
    return config


def page_hash_key(options: argparse.Namespace) -> bytes | None:
    """Return the key of page hashes, of `--kv-secret-file` or a secret kept in `--kv-disk`; None: a random one."""
    file = options.kv_secret_file
    if file is None and options.kv_disk is not None:
        file = Path(options.kv_disk) / "secret"
        try:
            make_secret(file)
        except OSError as error:
            raise ValueError(f"--kv-disk {file.parent} can't be used: {error}") from None
    if file is None:
        if options.kv_store is not None:
            raise ValueError("--kv-store needs --kv-secret-file: engines find each other's pages by keys made with it")
        return None
    return read_kv_secret(file)
