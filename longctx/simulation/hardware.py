"""The calibrated predictor of a model on a cluster: the same cost model by which an engine decides.

The shares that devices and links reach are in `longctx.parallel.device_tables`, fitted by
`benchmarks.calibration`; docs/simulation_hardware.md has the errors.
"""

import dataclasses
import math

import numpy as np

from longctx.models.config import LlamaConfig
from longctx.parallel.device_tables import Link
from longctx.parallel.operators import ReduceTable
from longctx.parallel.topology import Topology
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.roofline import roofline
from longctx.serving.predictor.runtime import CurvePredictor

GPUS_PER_HOST = 8
MOST_ROWS = 16_384  # of the steps among which the smallest that saturates a device is looked for
SATURATED = 0.9  # of the most rows a second of any of these


def predictor(
    model: LlamaConfig,
    topology: Topology | str,
    plan: ParallelPlan | None = None,
    *,
    max_rows: int = 4096,
    kv_dtype: str | None = None,
) -> CurvePredictor:
    """Seconds of the steps of a model on a cluster.

    Where `tensor` is larger than a host, all-reduces go over the network too: see `all_reduce_over_hosts`.

    Args:
      model: whose sizes count.
      topology: or the name of a preset. Its link of `tensor` is that within a host, its link of `context` the network.
      plan: None: one device.
      max_rows: rows of the largest batch that is predicted exactly.
      kv_dtype: of the cache, as of `EngineConfig`.

    Returns:
      Seconds of a batch in one stage, by its `Work`.

    Raises:
      ValueError: the plan doesn't suit the model, tensor spans part of a host, the topology lacks a link or is not
        known, or a number is out of range.

    Source:
      Mnemosyne, 4.2, and Medha, 4.2: batches are predicted from profiles.

    Examples:
      >>> from longctx.models import LlamaConfig
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.simulation.hardware import predictor
      >>> model = LlamaConfig.preset("llama-3-8b")
      >>> for plan in (ParallelPlan(tensor=8), ParallelPlan(stage=4, tensor=8)):
      ...     stage = predictor(model, "h100-rdma", plan)
      ...     print(plan.stage, round(stage.prefill_seconds(0, 131_072, 4096), 2))  # of its layers, a stage's share
      1 1.71
      4 0.47
    """
    plan = plan or ParallelPlan()
    plan.check(model, plan.num_devices)
    if isinstance(topology, str):
        topology = Topology.preset(topology)
    if plan.tensor > GPUS_PER_HOST:
        hosts, rest = divmod(plan.tensor, GPUS_PER_HOST)
        if rest:
            raise ValueError(f"plan's tensor must be a multiple of a host's {GPUS_PER_HOST} GPUs, got {plan.tensor}")
        topology = all_reduce_over_hosts(topology, hosts)
    return roofline(
        model,
        topology,
        max_rows,
        stage=plan.stage,
        tensor=plan.tensor,
        context=plan.context,
        kv_dtype=kv_dtype,
        ffn=plan.ffn,
    )


def saturating_rows(
    model: LlamaConfig, topology: Topology, plan: ParallelPlan | None = None, kv_dtype: str | None = None
) -> int:
    """Rows of the smallest step, a power of two, that saturates the devices: the token budget of an operator.

    Larger steps add seconds to each token beside them and hardly raise throughput. Counted are products with weights,
    all-reduces and the fixed seconds of a step, not attention, whose products and bytes do not depend on the step.

    Args:
      model, topology, plan, kv_dtype: as for `predictor`.

    Returns:
      Rows on a rank, with which the devices compute at least 90 % of the most rows a second that they do with up to
      16,384.

    Raises:
      ValueError: as `predictor`.

    Examples:
      >>> from longctx.models import LlamaConfig
      >>> from longctx.parallel import Topology
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.simulation.hardware import saturating_rows
      >>> model, topology = LlamaConfig.preset("llama-3-8b"), Topology.preset("h100-rdma")
      >>> saturating_rows(model, topology), saturating_rows(model, topology, ParallelPlan(tensor=8))
      (512, 4096)
    """
    steps = predictor(model, topology, plan, max_rows=MOST_ROWS, kv_dtype=kv_dtype)
    rows = 2 ** np.arange(MOST_ROWS.bit_length())
    rates = rows / np.interp(rows, steps.rows, steps.linear)
    return int(rows[np.argmax(rates >= SATURATED * rates.max())])


def all_reduce_over_hosts(topology: Topology, hosts: int) -> Topology:
    """A topology in which `tensor` spans several hosts: each all-reduce has two levels at a time.

    Within each host a reduce-scatter and an all-gather; between them GPUs of the same place in all hosts reduce their
    share, an n-th, over the network: by a tree, `2 log2(hosts)` hops one after the other, with bandwidth as of a ring.
    A message goes through both levels in pieces, so that its bytes take as long as on the slower level, and latencies
    add up. So the link of `tensor` becomes one of which an all-reduce takes as long.

    Args:
      topology: whose link of `tensor` is that within a host, and of `context` the network.

    Raises:
      ValueError: there is no such link.

    Source:
      NVIDIA, nccl-tests, issues 283 and 290: over hosts of 8 Hopper GPUs with 8 links of 400 Gb/s bus bandwidths of 350
      GB/s, nearly what the links have; one level after the other would leave half of it.
    """
    inner, outer = topology.link("tensor"), topology.link("context")
    devices = hosts * GPUS_PER_HOST
    # Bytes that a GPU sends for each byte that is reduced: in all, within the host, and over the network.
    sent = 2 * (devices - 1) / devices
    inside = 2 * (GPUS_PER_HOST - 1) / GPUS_PER_HOST
    across = 2 * (hosts - 1) / hosts / GPUS_PER_HOST / _collective_bandwidth(outer)
    inner_latency = inner.latency if inner.collective_latency is None else inner.collective_latency
    hops = 2 * math.ceil(math.log2(hosts)) * (outer.latency if outer.reduce_latency is None else outer.reduce_latency)
    table = inner.reduce_table
    if table is not None:
        within = [float(table.reduce(size, GPUS_PER_HOST)) for size in table.sizes]
        seconds = (max(first, size * across) + hops for size, first in zip(table.sizes, within, strict=True))
        table = ReduceTable(table.sizes, {devices: tuple(seconds)})
    link = Link(
        f"{inner.name} and {outer.name}, {hosts} hosts",
        sent / max(inside / _collective_bandwidth(inner), across),
        inner_latency + hops,
        share=1.0,
        all_reduces=table,
    )
    return dataclasses.replace(topology, links={**topology.links, "tensor": link})


def _collective_bandwidth(link: Link) -> float:
    return link.bandwidth * (link.share if link.collective_share is None else link.collective_share)
