"""A predictor from data sheets: a model's products and bytes over what a device reaches, and exchanges over its links.

Source: Mnemosyne, section 3.1 (equations 1 to 4: FLOPs and bytes of attention and of the rest).
"""

import dataclasses
import math
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from longctx.models import LlamaConfig
from longctx.models.footprint import kv_row_bytes
from longctx.models.layer_runs import layers_per_stage, most_full_layers
from longctx.parallel.cost import ModelShape, as_float, check_count
from longctx.parallel.device_tables import Device
from longctx.parallel.operators import AttentionCost, on_line
from longctx.parallel.topology import Topology
from longctx.serving.predictor.attention import KernelSeconds, SlidingCost
from longctx.serving.predictor.runtime import CurvePredictor, ExchangeCost, SharedWeights


def element_bytes_of(dtype: str | None, topology: Topology | None) -> int:
    """Bytes of a number that is not quantised; None: of the type that devices compute in, float32 on CPUs."""
    if dtype is None:
        return 4 if topology is not None and topology.device.name == "cpu" else 2
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def roofline(
    model: LlamaConfig,
    topology: Topology,
    max_rows: int,
    *,
    stage: int = 1,
    tensor: int = 1,
    context: int = 1,
    overhead: float = 0.0,
    element_bytes: float = 2,
    kv_dtype: str | None = None,
    buckets: tuple[int, ...] = (),
    ffn: Literal["tensor", "all"] = "tensor",
) -> CurvePredictor:
    """Make the predictor of a model on `stage * context * tensor` devices.

    Products with weights, all-reduces and attention take what was measured, where the device and its link have these
    tables. Otherwise the time of a linear layer is the longer of its products and of reading its weights, and what that
    doesn't hide of the shorter, and that of attention is its products plus reading keys and values, less what is hidden
    of the shorter; of sliding layers they are those that the window leaves. The device says which shares are reached
    and hidden. A layer has norms, additions and activations besides, and two all-reduces over `tensor`; quantised
    weights have one byte, and the device's rate for FP8. What replicated and sharded rows exchange over `context`: see
    `ExchangeCost`. With
    several stages the predicted time is that of the largest stage, or of equal ones that with most layers without a
    window: other batches are in the other stages meanwhile, and a token takes `stage` times as long. The head's
    vocabulary is sharded over stage and tensor.

    With `ffn="all"` a device reads a part of the output projection and the feed-forward, 1 / context of it, for the
    rows of all ranks; replicated rows take a part of those products too. See `SharedWeights` for what rows exchange.

    Args:
      topology: what devices and links reach.
      max_rows: rows of the largest batch that is predicted exactly.
      overhead: further seconds of each batch.
      element_bytes: of a number that is not quantised.
      kv_dtype: of cached keys and values, as of `EngineConfig`; they are exchanged as they are cached.
      buckets: numbers of rows that steps are compiled for, ascending; empty: a step computes no padding.
      ffn: as of `ParallelPlan`.

    Raises:
      ValueError: there are fewer layers than stages, tensor does not divide the heads, the topology has no link for an
        axis of several devices, or a number is out of range.
    """
    stage, tensor, context = (
        check_count("stage", stage, 1),
        check_count("tensor", tensor, 1),
        check_count("context", context, 1),
    )
    if stage > model.num_layers:
        raise ValueError(f"stage must be at most the {model.num_layers} layers, got {stage}")
    if model.num_heads % tensor:
        raise ValueError(f"tensor must divide the {model.num_heads} query heads, got {tensor}")
    check_count("max_rows", max_rows, 1)
    if not 0 <= as_float(overhead) < math.inf:
        raise ValueError(f"overhead must be a finite number that is not negative, got {overhead!r}")
    if not 0 < as_float(element_bytes) < math.inf:
        raise ValueError(f"element_bytes must be a positive, finite number, got {element_bytes!r}")
    topology.check(stage=stage, tensor=tensor, context=context)
    device, layers, element = topology.device, layers_per_stage(model.num_layers, stage), element_bytes
    flops, bandwidth = device.reached_flops(element), device.reached_bandwidth
    heads, kv_heads = model.num_heads / tensor, max(1.0, model.num_kv_heads / tensor)
    kernel = device.attention_cost(model.head_dim, kv_row_bytes(model.head_dim, element, kv_dtype) / model.head_dim)
    ffn_ranks = context if ffn == "all" else 1
    full, quantized = (layers * count / tensor for count in layer_weights(model))
    part = tuple(layers * count / tensor for count in layer_weights(model, ffn_ranks))
    head = model.vocab_size * model.hidden_size / (tensor * stage)
    read = (part[0] * element + part[1]) / bandwidth
    seconds_per_row, of_part = (2 * (x / flops + y / device.reached_flops(1)) for x, y in ((full, quantized), part))
    elements = 0.0
    if device.element_share is not None:
        elements = (
            layers * element_bytes_of_row(model, tensor, element) / (device.memory_bandwidth * device.element_share)
        )
    # Bytes a row that each half of an all-reduce, reduce-scatter and all-gather, sends: all but the device's own share.
    message = 2 * (tensor - 1) / tensor * model.hidden_size * element

    measured = _measured_layer(model, device, tensor, stage, ffn_ranks, element) if device.products else None
    reduces = topology.link("tensor").reduce_table if tensor > 1 else None

    def linear(count: int) -> float:
        reduce = topology.hardware("tensor", element).collective(count * message) if tensor > 1 else 0.0
        if reduces is not None:
            reduce = float(reduces.reduce(count * model.hidden_size * element, tensor))
        move = topology.hardware("stage", element).hop(count * model.hidden_size * element) if stage > 1 else 0.0
        fixed = overhead + device.step_seconds + layers * (device.layer_seconds + kernel.latency)
        products = count * seconds_per_row
        layer = max(products, read) + (1 - device.overlap) * min(products, read)
        logits = head * element / bandwidth
        if measured is not None:
            layer, logits = layers * float(on_line(count, measured.rows, measured.layer)), measured.logits
        return fixed + layer + count * elements + logits + 2 * layers * reduce + move

    exchange = None
    if context > 1:
        shape = ModelShape(model.num_heads, model.num_kv_heads, model.head_dim).split(tensor)
        hardware = topology.hardware("context", element)
        if kv_dtype is not None:
            key_bytes = kv_row_bytes(model.head_dim, element, kv_dtype) / model.head_dim
            hardware = dataclasses.replace(hardware, key_bytes_per_element=key_bytes)
        shared = None
        if ffn_ranks > 1:
            row_bytes = model.hidden_size * element
            latency, per_byte = _sum_over_ranks(topology, tensor, context)
            share = of_part / seconds_per_row
            # What the curve of rows has of all rows alike, but counts for a share of a replicated one alone.
            alike = topology.hardware("tensor", element).collective(2 * message, count=0) if tensor > 1 else 0.0
            per_row = 2 * row_bytes * per_byte + (1 - share) * (alike + elements / layers)
            shared = SharedWeights(row_bytes, 2 * latency, per_row, share)
        exchange = ExchangeCost(layers, context, shape, hardware, shared)
    # Linear between these knots; the last are where products begin to take longer than reading the weights.
    knee = math.floor(min(read / seconds_per_row, max_rows))

    def attention(count: int) -> tuple[float, float]:
        """Seconds of a pair and of a key in some layers."""
        key = 2 * count * kv_heads * kv_row_bytes(model.head_dim, element, kv_dtype)
        pair = 4 * count * heads * model.head_dim
        rate = device.data_sheet_flops(element) * kernel.prompt_share
        return pair / rate, key / (device.memory_bandwidth * kernel.key_share)

    num_full, sliding = most_full_layers(model, stage), None
    if model.sliding_window is not None and num_full < layers:
        count = layers - num_full
        sliding = SlidingCost(model.sliding_window, *attention(count), share=count / layers)
    per_pair, per_key = attention(num_full)
    rows = sorted({1, 2, *(1 << i for i in range(1, 13)), max(2, max_rows), max(1, knee), max(1, knee) + 1})
    if measured is not None:
        rows = sorted({2, max(2, max_rows), *(1 << i for i in range(15)), *map(math.ceil, measured.rows)})
    return CurvePredictor(
        tuple(rows),
        tuple(accumulate(map(linear, rows), max)),
        per_pair=per_pair,
        per_key=per_key,
        per_sample=2 * head / flops,
        exchange=exchange,
        overlap=device.attention_overlap,
        buckets=buckets,
        sliding=sliding,
        kernel=_kernel_seconds(kernel, heads, kv_heads, layers),
    )


class _MeasuredLayer(NamedTuple):
    """Seconds of a layer's products at numbers of rows of a rank, and of reading the head's weights."""

    rows: np.ndarray
    layer: np.ndarray
    logits: float


def _measured_layer(
    model: LlamaConfig, device: Device, tensor: int, stage: int, ffn_ranks: int, element: float
) -> _MeasuredLayer:
    """Sum the measured products of a layer: queries, keys and values in one, and gate and up projection.

    With weights that ranks share, each multiplies the rows of all ranks by its part of them.
    """
    hidden, size, inner = model.hidden_size, model.head_dim, model.intermediate_size / tensor / ffn_ranks
    heads, kv_heads = model.num_heads / tensor, max(1.0, model.num_kv_heads / tensor)
    weights = (  # name of one, n, k, ranks whose rows it multiplies
        ("wq", (heads + 2 * kv_heads) * size, hidden, 1),
        ("wo", hidden, heads * size / ffn_ranks, ffn_ranks),
        ("w_gate", 2 * inner, hidden, ffn_ranks),
        ("w_down", hidden, inner, ffn_ranks),
    )
    names = [] if model.quantization is None else [name for layer in model.quantization.layers for name in layer]
    curves = []
    for name, n, k, ranks in weights:
        quantized = names.count(name) / model.num_layers
        for share, wide in ((quantized, 1.0), (1 - quantized, element)):
            if share:
                rows, seconds = device.product_curve(n, k, wide)
                curves.append((np.array(rows) / ranks, share * seconds))
    knots = np.unique(np.concatenate([rows for rows, _ in curves]))
    layer = sum(on_line(knots, *curve) for curve in curves)
    vocabulary = device.product_curve(model.vocab_size / (tensor * stage), hidden, element)[1][0]
    return _MeasuredLayer(knots, np.asarray(layer), float(vocabulary))


def _kernel_seconds(kernel: AttentionCost, heads: float, kv_heads: float, layers: int) -> KernelSeconds:
    """Seconds of a kernel in some layers, for one device's heads."""
    return KernelSeconds(
        prompts=layers * kernel.prompt_latency,
        path=layers * kernel.path,
        path_most=layers * kernel.path_seconds,
        row=layers * (kernel.row + kernel.row_head * heads + kernel.row_kv_head * kv_heads),
        chunk=layers * kv_heads * kernel.chunk_kv_head,
        decode=layers * (kernel.decode_head * heads + kernel.decode_kv_head * kv_heads),
        decode_overlap=kernel.decode_overlap,
        latency=layers * kernel.latency,
        kv_heads=kv_heads,
        decode_ratios=tuple(kernel.decode_ratios),
    )


def _sum_over_ranks(topology: Topology, tensor: int, context: int) -> tuple[float, float]:
    """Seconds, and seconds a byte, by which an all-reduce over `tensor` and `context` exceeds one over `tensor`.

    Over one kind of link it is one ring. Else GPUs of the same place in all hosts reduce a share of the bytes, by a
    tree; sums of the few rows of decodes are too short for one level to hide the other, so that all of it counts.
    """
    link, hardware = topology.link("context"), topology.hardware("context")
    per_byte = hardware.collective(1, count=0)
    if tensor == 1 or topology.link("tensor") == link:
        devices = tensor * context
        sent = 2 * ((devices - 1) / devices - (tensor - 1) / tensor)
        return (hardware.collective(0) if tensor == 1 else 0.0), sent * per_byte
    hop = link.latency if link.reduce_latency is None else link.reduce_latency
    return 2 * math.ceil(math.log2(context)) * hop, 2 * (context - 1) / context / tensor * per_byte


def element_bytes_of_row(model: LlamaConfig, tensor: int, dtype_bytes: float = 2) -> float:
    """Bytes that the element-wise operators of a layer read and write for one row, on one of `tensor` devices.

    Two norms (read, write) and two residual additions (read twice, write) of the hidden state, which all devices have
    whole; the rotary embedding of queries and keys (read, write), and the activation (read twice, write), which are
    divided.
    """
    rotary = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    return dtype_bytes * (10 * model.hidden_size + (rotary + 3 * model.intermediate_size) / tensor)


def layer_weights(model: LlamaConfig, ffn_ranks: int = 1) -> tuple[float, float]:
    """Weights of a layer that are not quantised, and of those that are, on average over the layers.

    Of output projection and feed-forward they are those of one of `ffn_ranks` ranks.
    """
    attention = model.num_heads * model.head_dim * model.hidden_size
    keys = model.num_kv_heads * model.head_dim * model.hidden_size
    ffn, out = model.hidden_size * model.intermediate_size / ffn_ranks, attention / ffn_ranks
    sizes = {"wq": attention, "wo": out, "wk": keys, "wv": keys, "w_gate": ffn, "w_up": ffn, "w_down": ffn}
    names = [] if model.quantization is None else [name for layer in model.quantization.layers for name in layer]
    quantized = sum(sizes[name] for name in names) / model.num_layers
    return sum(sizes.values()) - quantized, quantized
