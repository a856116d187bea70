"""Setup of an engine: its mesh, its plan, how many pages each rank has room for, its predictor."""

import dataclasses
import datetime
import hashlib
import os
import re
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.typing import DTypeLike

from longctx.models import Llama, Tokenizer
from longctx.models.params import Params
from longctx.parallel.mesh import make_mesh
from longctx.parallel.topology import AXES, Topology, find_topology
from longctx.serving.config import EngineConfig
from longctx.serving.distributed.mesh import make_process_mesh
from longctx.serving.distributed.process_group import ProcessGroup
from longctx.serving.engine.build import build_core
from longctx.serving.engine.core import Core
from longctx.serving.engine.input_processor import InputProcessor, SequenceMaker
from longctx.serving.engine.memory import (
    default_pages,
    estimate,
    steps_in_flight,
)
from longctx.serving.engine.page_fingerprint import page_fingerprint
from longctx.serving.executor.executor import DeviceExecutor
from longctx.serving.executor.page_fit import PageFit
from longctx.serving.kv_cache.connector import PageKeeper
from longctx.serving.kv_cache.page_layout import PageLayout
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.file import Writable
from longctx.serving.predictor.roofline import element_bytes_of, roofline
from longctx.serving.predictor.runtime import Predictor, check_predictor
from longctx.serving.predictor.work import Work
from longctx.serving.recording.log import Header
from longctx.serving.recording.recorder import Recorder
from longctx.serving.runner.device_memory import DeviceMemory, MemoryUse
from longctx.serving.runner.page_transfer import process_part


class PageIdentity(NamedTuple):
    """Layout of pages, and a digest of model and weights: all that they depend on but their tokens."""

    layout: PageLayout
    fingerprint: bytes


class EngineSetup(NamedTuple):
    """The arguments of an engine, checked against each other and completed.

    `num_pages` is of each context rank; `is_profiled`: whether the predictor was given.
    """

    model: Llama
    config: EngineConfig
    plan: ParallelPlan
    mesh: Mesh | None
    tokenizer: Tokenizer | None
    predictor: Predictor
    is_profiled: bool
    num_pages: int
    max_length: int
    topology: Topology
    element_bytes: int

    def identify_pages(self, params: Params | None) -> PageIdentity | None:
        """Identify the engine's pages to tiers and other engines; None if they stay in it."""
        if params is None or not (self.config.tiers or self.config.transfers):
            return None
        model, dtype = self.model.config, self.config.kv_dtype or str(params["embed"].dtype)
        layout = PageLayout(model.num_layers, model.num_kv_heads, model.head_dim, self.config.page_size, dtype)
        return PageIdentity(layout, page_fingerprint(model, params, layout))

    def open_store(self, pages: PageIdentity | None) -> PageKeeper | None:
        """Open what keeps pages beyond the devices, as `config.tiers` says; None: nothing. A process keeps its part."""
        if pages is None or self.config.tiers is None:
            return None
        part = None if self.mesh is None else process_part(self.mesh, self.model.config)
        return TieredStore(self.config.tiers, *pages, part=part)

    def make_executor(
        self, params: Params | None, store: PageKeeper | None, group: ProcessGroup
    ) -> tuple[DeviceExecutor, Self]:
        """Make the executor that runs batches on the mesh; returns it, and this setup with its number of pages.

        On accelerators these are as many as fit beside the largest programs of a step, which are compiled to find out.
        """
        if params is None or self.mesh is None:
            raise ValueError("params must be given, unless an executor is")
        fit = self._page_fit(params["embed"].dtype, group)
        executor = DeviceExecutor.on_mesh(
            self.model,
            params,
            self.config,
            self.plan,
            self.mesh,
            self.num_pages if fit is None else self.config.num_pages,
            self.max_length,
            store,
            fit,
        )
        return executor, self._replace(num_pages=executor.num_pages)

    def _page_fit(self, dtype: DTypeLike, group: ProcessGroup) -> PageFit | None:
        """Make the search for how many pages fit into an accelerator's memory; None for CPUs."""
        mesh, most = self.mesh, self.config.most_pages(self.max_length)
        if mesh is None or DeviceMemory.of(mesh.local_devices) is None:
            return None

        def measure() -> MemoryUse:
            return estimate(self.model, self.config, mesh, dtype, 0, self.max_length, True, self.plan)

        return PageFit(measure, most, steps_in_flight(self.config), lambda pages: min(group.gather("pages", pages)))

    def make_core(self) -> tuple[Core, InputProcessor, SequenceMaker]:
        """Make the core, and what turns requests into its sequences."""
        core, processor, maker = build_core(
            self.model.config,
            self.config,
            self.plan,
            self.predictor,
            self.num_pages,
            self.max_length,
            self.tokenizer,
            self.topology,
            self.element_bytes,
        )
        core.is_profiled = self.is_profiled
        return core, processor, maker

    def begin_recording(self, recorder: Recorder, params: Params | None, core: Core, leads: bool) -> None:
        """Let a recorder record the engine's core."""
        if not leads:
            raise ValueError("recorder must be None but in the first process, which all others follow")
        if not isinstance(self.config.policy, str) or not isinstance(self.predictor, Writable):
            raise ValueError("recorder must be None for a custom policy or predictor, which a log can't hold")
        header = Header(
            model=self.model.config,
            config=self.config,
            plan=self.plan,
            num_pages=self.num_pages,
            max_length=self.max_length,
            predictor=self.predictor,
            dtype=None if params is None else str(params["embed"].dtype),
            topology=self.topology,
            created=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
        )
        recorder.begin(header, core)


def resolve(
    model: Llama,
    params: Params | None,
    config: EngineConfig | None,
    mesh: Mesh | None,
    plan: ParallelPlan | None,
    tokenizer: Tokenizer | None,
    predictor: Predictor | None,
    process_group: ProcessGroup,
    topology: Topology | None = None,
) -> EngineSetup:
    """Check and complete the arguments of an `Engine`, which says what they are."""
    config = config or EngineConfig()
    plan, mesh = resolve_mesh(model, params, mesh, plan, process_group)
    max_length = config.longest_sequence(model.config.max_positions)
    num_pages = config.num_pages or config.most_pages(max_length)
    if params is not None and mesh is not None and DeviceMemory.of(mesh.local_devices) is None:
        # Of accelerators the programs of steps say how much memory they need, see `make_executor`.
        dtype = params["embed"].dtype
        estimate(model, config, mesh, dtype, config.num_pages or 0, max_length, True, plan).check()
        num_pages = config.num_pages or default_pages(model, config, mesh, dtype, max_length, plan)
    topology = resolve_topology(topology, plan, mesh)
    is_profiled = predictor is not None
    element_bytes = element_bytes_of(None if params is None else str(params["embed"].dtype), topology)
    if predictor is None:
        sizes: Any = {axis: getattr(plan, axis) for axis in AXES}
        predictor = roofline(
            model.config,
            topology,
            config.token_budget,
            element_bytes=element_bytes,
            kv_dtype=config.kv_dtype,
            buckets=config.row_buckets if plan.context == 1 else (),
            ffn=plan.ffn,
            **sizes,
        )
    check_predictor(predictor, config.token_budget)
    setup = EngineSetup(
        model, config, plan, mesh, tokenizer, predictor, is_profiled, num_pages, max_length, topology, element_bytes
    )
    return setup if process_group.num_processes == 1 else _agree(process_group, setup, params)


def _agree(group: ProcessGroup, setup: EngineSetup, params: Params | None) -> EngineSetup:
    """Return the setup with the hash key and the number of pages of all processes."""
    config, mesh, tokenizer = setup.config, setup.mesh, setup.tokenizer
    settings = dataclasses.asdict(config)
    secret = settings.pop("hash_key")
    if not isinstance(config.policy, str):
        attributes = repr(sorted(getattr(config.policy, "__dict__", {}).items()))
        settings["policy"] = [type(config.policy).__qualname__, re.sub(r" at 0x[0-9a-f]+", "", attributes)]
    # Predictors are compared on a step of each number of rows, with and without context.
    probes = [Work().with_chunk(start, rows, True) for rows in config.row_buckets for start in (0, 4096)]
    group.agree(
        "engine",
        settings
        | {f"plan.{name}": value for name, value in dataclasses.asdict(setup.plan).items()}
        | {f"model.{name}": value for name, value in dataclasses.asdict(setup.model.config).items()}
        | {
            "dtype": None if params is None else str(params["embed"].dtype),
            "predictor": [setup.predictor.seconds(work) for work in probes],
            "devices": None if mesh is None else [device.id for device in mesh.devices.flat],
            "tokenizer": None if tokenizer is None else [type(tokenizer).__name__, *sorted(tokenizer.eos_ids)],
            "max_length": setup.max_length,
            "topology": setup.topology.to_dict(),
            "hash_key": None if secret is None else hashlib.blake2b(secret).hexdigest(),
        },
    )
    gathered = group.gather("pages", [setup.num_pages, os.urandom(32).hex()])
    config = dataclasses.replace(config, hash_key=bytes.fromhex(gathered[0][1]) if secret is None else secret)
    return setup._replace(config=config, num_pages=min(pages for pages, _ in gathered))


def resolve_topology(topology: Topology | None, plan: ParallelPlan, mesh: Mesh | None) -> Topology:
    """The given topology, or the one that is found from the mesh."""
    if topology is None:
        return find_topology(mesh)
    if not isinstance(topology, Topology):
        raise TypeError(f"topology must be a Topology, such as Topology.preset('h100-rdma'), got {topology!r}")
    topology.check(**{axis: getattr(plan, axis) for axis in AXES})
    return topology


def resolve_mesh(
    model: Llama, params: Params | None, mesh: Mesh | None, plan: ParallelPlan | None, group: ProcessGroup
) -> tuple[ParallelPlan, Mesh | None]:
    """The plan of an engine and its mesh, each from the other where one is missing; no mesh without params."""
    if plan is not None and not isinstance(plan, ParallelPlan):
        raise TypeError(f"plan must be a ParallelPlan, got {plan!r}")
    if mesh is not None:
        unknown = set(mesh.shape) - set(AXES)
        if unknown:
            raise ValueError(f"mesh must have the axes stage, context and tensor, got {tuple(mesh.shape)}")
        sizes = {axis: mesh.shape.get(axis, 1) for axis in AXES}
        plan = ParallelPlan(**sizes) if plan is None else plan
        if any(getattr(plan, axis) != size for axis, size in sizes.items()):
            raise ValueError(f"mesh must be of the plan's sizes, {plan}, got {sizes}")
        devices = mesh.devices.transpose([mesh.axis_names.index(axis) for axis in AXES if axis in mesh.shape])
        mesh = Mesh(devices.reshape(*sizes.values()), AXES, axis_types=(AxisType.Auto,) * 3)
    elif params is not None:
        there = params["embed"].devices()
        if plan is None and len(there) > 1:
            raise ValueError(f"mesh or plan must be given for parameters on {len(there)} devices")
        plan = plan or ParallelPlan()
    plan = plan or ParallelPlan()
    # An executor that was given needs no devices.
    plan.check(model.config, plan.num_devices if params is None else jax.device_count())
    if params is None:
        return plan, mesh
    if mesh is None:
        if group.num_processes > 1:
            mesh = make_process_mesh(group, plan.stage, plan.context, plan.tensor)
        elif plan.num_devices == 1:
            there = sorted(params["embed"].devices(), key=lambda device: device.id)
            mesh = Mesh(np.array(there[:1]).reshape(1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)
        else:
            mesh = make_mesh(plan.stage, plan.context, plan.tensor)
    found, expected = len({device.process_index for device in mesh.devices.flat}), group.num_processes
    if found != expected:
        raise ValueError(
            f"mesh must have devices of {expected} processes (hosts), and has those of {found}: see make_process_mesh"
        )
    return plan, mesh
