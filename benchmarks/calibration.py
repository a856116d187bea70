"""Fits the shares of the device tables to measured operators: the tables that Vidur's profiler writes.

`python -m benchmarks.calibration FOLDER` prints what is fitted, the error on rows that no fit has seen, and
what `longctx.parallel.device_tables` has. Few numbers are fitted, each of which means something and holds for every
model, plan and figure. A random half of the rows is fitted, the other half evaluates.

Source: Vidur (Agrawal et al. 2024), data/profiling; Mnemosyne, section 4.2, and Medha, 4.1, which predict by it too.
"""

import csv
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from longctx.parallel.device_tables import DEVICES, LINKS, Device, Link
from longctx.serving.predictor.fit import fit_non_negative

Row = Mapping[str, str]

LAYER_OPERATORS = (
    *("input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "post_attention_layernorm"),
    *("mlp_up_proj", "mlp_act", "mlp_down_proj", "add", "add"),
)
"""Operators of one layer, as a table of linear layers names them."""
SHAPE = ("n_embd", "n_head", "n_kv_head", "n_expanded_embd", "num_tokens", "num_tensor_parallel_workers")
ATTENTION_COLUMNS = (
    "n_embd",
    "n_q_head",
    "n_kv_head",
    "num_tensor_parallel_workers",
    "is_prefill",
    "batch_size",
    "prefill_chunk_size",
    "kv_cache_size",
    "time_stats.attn_prefill.median",
    "time_stats.attn_decode.median",
)
MLP_TABLES = {
    "A100": ("a100_meta-llama_Meta-Llama-3-8B_mlp.csv", "a100_meta-llama_Meta-Llama-3-70B_mlp.csv"),
    "H100": ("h100_meta-llama_Llama-2-70b-hf_mlp.csv",),
}
ATTENTION_TABLE = "a100_70b-shape_tp2_4k_attention.csv"
NVLINKS = {"A100": "nvlink-a100", "H100": "nvlink-h100"}
NETWORKS = {"A100": "rdma-200g", "H100": "rdma-400g"}


@dataclasses.dataclass(frozen=True)
class Fit:
    """What was fitted to some rows, and how well it predicts others.

    Attributes:
      subject: of what. values: by the names of attributes of `Device` or `Link`.
      error: mean of |predicted / measured - 1| over the rows that evaluate. by_time: their summed absolute errors over
        their summed seconds. rows: how many these are.
    """

    subject: str
    values: Mapping[str, float]
    error: float
    by_time: float
    rows: int


def halves(count: int, seed: int = 0) -> np.ndarray:
    """Which of so many rows are fitted, `[count]` bool; the others evaluate."""
    return np.random.default_rng(seed).random(count) < 0.5


def _fit(subject: str, values: Mapping[str, float], predicted: np.ndarray, measured: np.ndarray) -> Fit:
    off = np.abs(predicted - measured)
    return Fit(subject, values, float((off / measured).mean()), float(off.sum() / measured.sum()), len(measured))


def read_rows(path: Path, columns: Sequence[str], operators: Sequence[str]) -> list[Row]:
    """Read a table of operators; rows that lack a time are left out, as some of Vidur's do.

    Raises:
      OSError: the file can't be read.
      ValueError: it has no rows, or lacks a column; the message names it.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows: list[Row] = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} has no rows")
    medians = [f"time_stats.{name}.median" for name in dict.fromkeys(operators)]
    if missing := [name for name in (*columns, *medians) if name not in rows[0]]:
        raise ValueError(f"{path} must have the column {missing[0]!r}")
    rows = [row for row in rows if all(row[name] for name in medians)]
    if not rows:
        raise ValueError(f"{path} has no row with all of {', '.join(medians)}")
    return rows


def milliseconds(row: Row, operator: str) -> float:
    """The median time of an operator."""
    return float(row[f"time_stats.{operator}.median"])


def layer_work(rows: Sequence[Row]) -> np.ndarray:
    """FLOPs of products, bytes of weights, bytes of the element-wise operators, and rows of each table row, `[n, 4]`.

    Of one layer on one device; see `roofline.element_bytes_of_row`.
    """
    work = []
    for row in rows:
        hidden, heads, kv_heads, ffn, count, tensor = (int(row[name]) for name in SHAPE)
        size = hidden // heads
        weights = (2 * hidden * (heads + kv_heads) * size + 3 * hidden * ffn) / tensor
        elements = 10 * hidden + (2 * (heads + kv_heads) * size + 3 * ffn) / tensor
        work.append((2 * count * weights, 2 * weights, 2 * count * elements, count))
    return np.array(work)


def layer_seconds(work: np.ndarray, device: Device) -> np.ndarray:
    """Seconds that a device is predicted to take for `layer_work`, `[n]`: the terms of `roofline.roofline`."""
    products, reading = work[:, 0] / device.reached_flops(), work[:, 1] / device.reached_bandwidth
    elements = work[:, 2] / (device.memory_bandwidth * (device.element_share or 1.0))
    return products + reading - device.overlap * np.minimum(products, reading) + elements + device.layer_seconds


def fit_layers(rows: Sequence[Row], device: Device) -> tuple[Device, Fit]:
    """Fit a device's shares to linear layers: products, reading weights, element-wise operators, overlap, latency.

    Relative errors count, and each power of two of `num_tokens` alike: the tables have few rows of few tokens, which
    are what decodes are.

    Returns:
      the device with these shares, and the fit.
    """
    work = layer_work(rows)
    measured = np.array([sum(milliseconds(row, name) for name in LAYER_OPERATORS) for row in rows]) / 1e3
    fitted = halves(len(rows))
    octave = np.floor(np.log2(work[:, 3])).astype(int)
    weight = 1 / np.sqrt(np.maximum(1, np.bincount(octave[fitted], minlength=octave.max() + 1)))[octave]
    names = ("flops_share", "memory_share", "overlap", "element_share", "layer_seconds")

    def apply(numbers: np.ndarray) -> Device:
        shares: dict[str, Any] = dict(zip(names, numbers.tolist(), strict=True))
        return dataclasses.replace(device, **shares)

    def errors(numbers: np.ndarray) -> np.ndarray:
        return (layer_seconds(work[fitted], apply(numbers)) / measured[fitted] - 1) * weight[fitted]

    begin, low, high = [0.6, 0.8, 0.5, 0.5, 3e-5], [0.05, 0.05, 0.0, 0.05, 0.0], [1.0, 1.0, 1.0, 1.0, 1e-2]
    found = least_squares(errors, begin, bounds=(low, high), x_scale=[1, 1, 1, 1, 1e-5]).x
    best = apply(found)
    values = {name: getattr(best, name) for name in names}
    others = ~fitted
    return best, _fit(f"{device.name}, linear layers", values, layer_seconds(work[others], best), measured[others])


def fit_prefill_attention(rows: Sequence[Row], device: Device) -> Fit:
    """Fit the share that attention of prompts' chunks reaches, from what each pair with a cached key adds.

    Chunks' own pairs and rows have terms of their own, which are left out: in long contexts nearly all keys are cached.
    Seconds count, not relative errors, so that the large calls decide, which long contexts consist of.
    """
    rows = [row for row in rows if row["is_prefill"] == "True"]
    chunk = np.array([int(row["prefill_chunk_size"]) for row in rows], float)
    cached = np.array([int(row["kv_cache_size"]) for row in rows], float)
    measured = np.array([milliseconds(row, "attn_prefill") for row in rows]) / 1e3
    features = np.stack([np.ones_like(chunk), chunk, chunk * chunk, chunk * cached], 1)
    fitted = halves(len(rows))
    scale = features.max(axis=0)
    numbers = nnls(features[fitted] / scale, measured[fitted])[0] / scale
    share = _per_pair_and_key(rows[0])[0] / float(numbers[3]) / device.flops["bfloat16"]
    values = {"attention_share": share}
    others = ~fitted
    return _fit(f"{device.name}, attention of prompts", values, features[others] @ numbers, measured[others])


def fit_decode_attention(rows: Sequence[Row], device: Device) -> Fit:
    """Fit the share of the memory bandwidth at which decodes read keys, and the latency of a call."""
    rows = [row for row in rows if row["is_prefill"] != "True"]
    keys = np.array([int(row["batch_size"]) * (int(row["kv_cache_size"]) + 1) for row in rows], float)
    measured = np.array([milliseconds(row, "attn_decode") for row in rows]) / 1e3
    features, fitted = np.stack([np.ones_like(keys), keys], 1), halves(len(rows))
    call, per_key = fit_non_negative(features[fitted], measured[fitted])
    share = _per_pair_and_key(rows[0])[1] / per_key / device.memory_bandwidth
    others = ~fitted
    return _fit(
        f"{device.name}, attention of decodes",
        {"key_share": share, "layer_seconds": call},
        features[others] @ np.array([call, per_key]),
        measured[others],
    )


def _per_pair_and_key(row: Row) -> tuple[float, float]:
    """FLOPs of a pair, and bytes of a key and value, of one layer on one device of an attention table."""
    tensor, size = int(row["num_tensor_parallel_workers"]), int(row["n_embd"]) // int(row["n_q_head"])
    return 4 * int(row["n_q_head"]) * size / tensor, 2 * 2 * int(row["n_kv_head"]) * size / tensor


def fit_link(rows: Sequence[Row], operator: str, link: Link, inside: bool) -> Fit:
    """Fit the share of a link's bandwidth and the latency, of an all-reduce or of a hop.

    Args:
      operator: `"all_reduce"`, in which each device sends `2 (n - 1) / n` of the bytes, or `"send_recv"`.
      inside: whether all devices are in one host, or each in a host of its own.
    """
    chosen = [row for row in rows if row["devices_per_node"] == (row["num_workers"] if inside else "1")]
    devices = np.array([int(row["num_workers"]) for row in chosen])
    sent = np.array([int(row["size"]) for row in chosen]) * (
        2 * (devices - 1) / devices if operator == "all_reduce" else 1.0
    )
    measured = np.array([milliseconds(row, operator) for row in chosen]) / 1e3
    features, fitted = np.stack([np.ones_like(sent), sent], 1), halves(len(chosen))
    latency, per_byte = fit_non_negative(features[fitted], measured[fitted])
    share = 1 / per_byte / link.bandwidth
    names = ("collective_share", "collective_latency") if operator == "all_reduce" else ("share", "latency")
    values = dict(zip(names, (share, latency), strict=True))
    predicted = features[~fitted] @ np.array([latency, per_byte])
    return _fit(f"{link.name}, {operator}", values, predicted, measured[~fitted])


def calibrate(folder: Path) -> list[Fit]:
    """Fit all tables of a folder, named as in Vidur's repository.

    Raises:
      OSError: a file is missing.
      ValueError: a file lacks rows or a column; the message names both.
    """
    fits = []
    for name, tables in MLP_TABLES.items():
        rows = [row for table in tables for row in read_rows(folder / table, SHAPE, LAYER_OPERATORS)]
        fits.append(fit_layers(rows, DEVICES[name])[1])
    rows = read_rows(folder / ATTENTION_TABLE, ATTENTION_COLUMNS, ())
    fits += [fit_prefill_attention(rows, DEVICES["A100"]), fit_decode_attention(rows, DEVICES["A100"])]
    for name, link in NVLINKS.items():
        for operator in ("all_reduce", "send_recv"):
            table = folder / f"{name.lower()}_dgx_{operator}.csv"
            rows = read_rows(table, ("num_workers", "devices_per_node", "size"), (operator,))
            fits.append(fit_link(rows, operator, LINKS[link], inside=True))
            if operator == "send_recv":
                fits.append(fit_link(rows, operator, LINKS[NETWORKS[name]], inside=False))
    return fits


def in_tables(subject: str, name: str) -> float | None:
    """What the device tables have for a value of a `Fit`."""
    entry = subject.partition(",")[0]
    found = getattr({**DEVICES, **LINKS}[entry], name)
    return None if found is None else float(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the fits of a folder beside the device tables."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 1:
        raise SystemExit("usage: python -m benchmarks.calibration FOLDER")
    print(f"{'fitted':34}{'':20}{'value':>12}{'in tables':>12}{'error':>8}{'by time':>9}{'rows':>7}")
    for fit in calibrate(Path(given[0])):
        errors = f"{fit.error:8.1%}{fit.by_time:9.1%}{fit.rows:7,}"
        for name, value in fit.values.items():
            known = in_tables(fit.subject, name)
            shown = "" if known is None else f"{known:.4g}"
            print(f"{fit.subject:34}{name:20}{value:12.4g}{shown:>12}{errors}")
            errors = ""


if __name__ == "__main__":
    main()
