"""A predictor from data sheets: a model's products and bytes over a device's peak rates.

Source: Mnemosyne, section 3.1 (equations 1 to 4: FLOPs and bytes of attention and of the rest).
"""

import dataclasses
from typing import Any

from longctx.models import LlamaConfig
from longctx.models.layer_runs import layers_per_stage
from longctx.parallel.cost import Hardware, check_count
from longctx.serving.predictor.runtime import CurvePredictor

# Dense bf16 products, memory bandwidth and one direction of NVLink, from NVIDIA's data sheets; latency is a guess.
GPUS = {
    "H200": Hardware(989e12, 450e9, latency=10e-6, memory_bandwidth=4.8e12),
    "H100": Hardware(989e12, 450e9, latency=10e-6, memory_bandwidth=3.35e12),
    "A100": Hardware(312e12, 300e9, latency=10e-6, memory_bandwidth=2.0e12),
}
# A few cores. It is rough, so schedulers correct it by measured batches (`Corrected`).
CPU = Hardware(100e9, 10e9, bytes_per_element=4, memory_bandwidth=15e9)


def hardware_of(device: Any) -> Hardware:
    """The data sheet of a `jax.Device`, by name; None counts as a CPU, and an unknown accelerator as an H100."""
    if device is None or device.platform == "cpu":
        return CPU
    return data_sheet(device) or GPUS["H100"]


def data_sheet(device: Any) -> Hardware | None:
    """The data sheet of a `jax.Device`; None if there is none, as of CPUs."""
    if device is None or device.platform == "cpu":
        return None
    return next((sheet for name, sheet in GPUS.items() if name in device.device_kind), None)


def roofline(
    model: LlamaConfig,
    hardware: Hardware,
    max_rows: int,
    *,
    stage: int = 1,
    tensor: int = 1,
    efficiency: float = 0.6,
    overhead: float = 0.0,
) -> CurvePredictor:
    """Make the predictor of a model on `stage * tensor` devices.

    The time of a linear layer is the longer of its products and of reading its weights, plus two all-reduces a layer
    over `tensor`. The time of attention is its products plus reading keys and values. With several stages the predicted
    time is that of one stage: other batches are in the other stages meanwhile, and a token takes `stage` times as
    long. The head's vocabulary is sharded over all devices.

    Args:
      hardware: of each device.
      max_rows: rows of the largest batch that is predicted exactly.
      efficiency: the share of peak FLOP/s and bytes/s that is reached.
      overhead: further seconds of each batch.

    Raises:
      ValueError: there are fewer layers than stages, tensor does not divide the heads, or a number is out of range.
    """
    stage, tensor = check_count("stage", stage, 1), check_count("tensor", tensor, 1)
    if stage > model.num_layers:
        raise ValueError(f"stage must be at most the {model.num_layers} layers, got {stage}")
    if model.num_heads % tensor:
        raise ValueError(f"tensor must divide the {model.num_heads} query heads, got {tensor}")
    check_count("max_rows", max_rows, 1)
    if not 0 < efficiency <= 1 or overhead < 0:
        raise ValueError(f"efficiency must be above 0 and at most 1, overhead not negative: {efficiency}, {overhead}")
    hardware = dataclasses.replace(
        hardware,
        peak_flops=hardware.peak_flops * efficiency,
        memory_bandwidth=hardware.memory_bandwidth * efficiency,
        bandwidth=hardware.bandwidth * efficiency,
    )
    layers, element = layers_per_stage(model.num_layers, stage), hardware.bytes_per_element
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    weights = layers * model.hidden_size * (attention + 3 * model.intermediate_size) / tensor
    head = model.vocab_size * model.hidden_size / (tensor * stage)
    # Bytes a row that each half of an all-reduce, reduce-scatter and all-gather, sends: all but the device's own share.
    message = 2 * (tensor - 1) / tensor * model.hidden_size * element

    def linear(count: int) -> float:
        products = max(2 * count * weights / hardware.peak_flops, weights * element / hardware.memory_bandwidth)
        reduce = hardware.latency + count * message / hardware.bandwidth if tensor > 1 else 0.0
        move = hardware.latency + count * model.hidden_size * element / hardware.bandwidth if stage > 1 else 0.0
        return overhead + products + 2 * layers * reduce + move + head * element / hardware.memory_bandwidth

    heads, kv_heads = model.num_heads / tensor, max(1.0, model.num_kv_heads / tensor)
    # Linear between these knots but for the row count where products begin to take longer than reading the weights.
    rows = sorted({1, 2, *(1 << i for i in range(1, 13)), max(2, max_rows)})
    return CurvePredictor(
        tuple(rows),
        tuple(map(linear, rows)),
        per_pair=4 * layers * heads * model.head_dim / hardware.peak_flops,
        per_key=2 * layers * kv_heads * model.head_dim * element / hardware.memory_bandwidth,
        per_sample=2 * head / hardware.peak_flops,
    )
