"""A predictor from measured times of single operators, in the tables that Vidur's profiler writes.

Source: Vidur (Agrawal et al. 2024), whose published tables of A100 and H100 have these columns; Mnemosyne, section 4.2.
"""

import csv
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longctx.models import LlamaConfig
from longctx.models.layer_runs import layers_per_stage
from longctx.parallel.topology import Topology
from longctx.serving.predictor.fit import fit_non_negative
from longctx.serving.predictor.roofline import exchange_cost
from longctx.serving.predictor.runtime import CurvePredictor

Row = Mapping[str, str]

LAYER_OPERATORS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
    "add",
)
"""Operators of one layer, as a table of linear layers names them."""


def read_table(path: Path, **equal: Any) -> list[Row]:
    """Read the rows of a CSV file whose columns equal the given values.

    Raises:
      OSError: the file can't be read.
      ValueError: it has no such column, or no such row.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows: list[Row] = list(csv.DictReader(file))
    for name in equal:
        if rows and name not in rows[0]:
            raise ValueError(f"{path} has no column {name!r}")
    rows = [row for row in rows if all(row[name] == str(value) for name, value in equal.items())]
    if not rows:
        raise ValueError(f"{path} has no rows with {equal}")
    return rows


def seconds_per_layer(row: Row) -> float:
    """Seconds of one layer's operators, from a table in milliseconds."""
    return sum(milliseconds(row, name) for name in LAYER_OPERATORS) / 1e3


def milliseconds(row: Row, operator: str) -> float:
    """The median time of an operator."""
    return float(row[f"time_stats.{operator}.median"])


def curve(
    rows: Iterable[Row], x: str, seconds: Callable[[Row], float], knots: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Fit a non-decreasing curve of seconds over column `x`; `numpy.interp` predicts what lies between its knots.

    It has up to `knots` knots, evenly spaced in the logarithm of x. A knot is the median of the rows nearest to it.

    Returns:
      x of the knots, ascending, and their seconds.
    """
    at = np.array([(float(row[x]), seconds(row)) for row in rows])
    numbers = np.unique(at[:, 0])
    targets = np.geomspace(numbers[0], numbers[-1], knots)
    chosen = np.unique(numbers[np.abs(np.log(numbers) - np.log(targets)[:, None]).argmin(axis=1)])
    nearest = np.abs(np.log(at[:, 0]) - np.log(chosen)[:, None]).argmin(axis=0)
    medians = [np.median(at[nearest == i, 1]) for i in range(len(chosen))]
    return chosen, np.maximum.accumulate(medians)


def fit_attention(rows: Iterable[Row]) -> np.ndarray:
    """Fit non-negative seconds `[4]` of one layer's attention: for each call, row, pair and key (see `Work`)."""
    return np.array(fit_non_negative(*attention_work(rows)))


def attention_work(rows: Iterable[Row]) -> tuple[np.ndarray, np.ndarray]:
    """The work of each row of an attention table, `[rows, 4]` (calls, rows, pairs, keys), and its seconds `[rows]`."""
    features, seconds = [], []
    for row in rows:
        cached = int(row["kv_cache_size"])
        if row["is_prefill"] == "True":
            chunk = int(row["prefill_chunk_size"])
            features.append((1, chunk, chunk * cached + chunk * (chunk + 1) // 2, chunk + cached))
            seconds.append(milliseconds(row, "attn_prefill") / 1e3)
        else:
            batch = int(row["batch_size"])
            features.append((1, batch, batch * (cached + 1), batch * (cached + 1)))
            seconds.append(milliseconds(row, "attn_decode") / 1e3)
    return np.array(features, float), np.array(seconds)


def from_tables(
    model: LlamaConfig,
    linear: Iterable[Row],
    attention: Iterable[Row],
    all_reduce: Iterable[Row] | None = None,
    *,
    tensor: int = 1,
    stage: int = 1,
    context: int = 1,
    topology: Topology | None = None,
) -> CurvePredictor:
    """Make the predictor of a model from tables of its operators on one of `tensor` devices.

    It leaves out messages between stages, and the logits. No table has exchanges over `context`: the links of the
    topology say how long they take.

    Args:
      linear: table of this model's linear layers, by `num_tokens`.
      attention: table of attention with any number of heads; times are scaled to the model's heads on a device.
      all_reduce: table by `size` in bytes, for rows of 2 bytes an element; None if tensor is 1.
      topology: for `context` ranks; not needed for one.

    Raises:
      ValueError: there are fewer layers than stages, `all_reduce` or the topology is missing, or `linear` is of another
        model or of another number of devices.
    """
    if not 1 <= stage <= model.num_layers:
        raise ValueError(f"stage must be 1 to the {model.num_layers} layers, got {stage}")
    if context > 1 and topology is None:
        raise ValueError(f"topology must be given for context={context}")
    linear, attention = list(linear), list(attention)
    if not linear or not attention:
        raise ValueError("linear and attention must have rows")
    if any(int(row["num_tensor_parallel_workers"]) != tensor for row in linear):
        raise ValueError(f"linear must be of tensor={tensor} devices, its rows differ")
    if any(int(row["n_embd"]) != model.hidden_size for row in linear):
        raise ValueError(f"linear must be of a hidden size of {model.hidden_size}, its rows differ")
    if tensor > 1 and all_reduce is None:
        raise ValueError(f"all_reduce must be given for tensor={tensor}")
    layers = layers_per_stage(model.num_layers, stage)
    numbers, seconds = curve(linear, "num_tokens", seconds_per_layer)
    per_call, per_row, per_pair, per_key = fit_attention(attention)
    measured = attention[0]
    devices = int(measured["num_tensor_parallel_workers"])
    size = int(measured["n_embd"]) // int(measured["n_q_head"])
    more_pairs = model.num_heads * model.head_dim / tensor / (int(measured["n_q_head"]) * size / devices)
    more_keys = max(1.0, model.num_kv_heads / tensor) * model.head_dim / (int(measured["n_kv_head"]) * size / devices)
    seconds = seconds + per_call + per_row * more_pairs * numbers
    if all_reduce is not None and tensor > 1:
        sizes, times = curve(all_reduce, "size", lambda row: milliseconds(row, "all_reduce") / 1e3)
        seconds = seconds + 2 * np.interp(numbers * model.hidden_size * 2, sizes, times)
    return CurvePredictor(
        tuple(numbers.astype(int).tolist()),
        tuple((layers * seconds).tolist()),
        per_pair=layers * per_pair * more_pairs,
        per_key=layers * per_key * more_keys,
        per_sample=0.0,
        exchange=None if topology is None else exchange_cost(model, topology, stage, context, tensor),
    )
