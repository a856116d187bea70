"""Fits the shares of the device tables to the operators that Vidur's profiler measured: linear layers and hops.

Products, attention and all-reduces in a host are fitted to newer kernels, see `benchmarks.measured_operators`; how far
these are from Vidur's linear layers is printed too.

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
from scipy.optimize import least_squares

from longctx.parallel.device_tables import DEVICES, LINKS, Device, Link
from longctx.parallel.operators import on_line
from longctx.serving.predictor.fit import fit_non_negative

Row = Mapping[str, str]

LAYER_OPERATORS = (
    *("input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "post_attention_layernorm"),
    *("mlp_up_proj", "mlp_act", "mlp_down_proj", "add", "add"),
)
"""Operators of one layer, as a table of linear layers names them."""
SHAPE = ("n_embd", "n_head", "n_kv_head", "n_expanded_embd", "num_tokens", "num_tensor_parallel_workers")
MLP_TABLES = {
    "A100": ("a100_meta-llama_Meta-Llama-3-8B_mlp.csv", "a100_meta-llama_Meta-Llama-3-70B_mlp.csv"),
    "H100": ("h100_meta-llama_Llama-2-70b-hf_mlp.csv",),
}
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


def fit_hop(rows: Sequence[Row], link: Link, inside: bool) -> Fit:
    """Fit the share of a link's bandwidth and the latency of a hop.

    Args:
      inside: whether all devices are in one host, or each in a host of its own.
    """
    chosen = [row for row in rows if row["devices_per_node"] == (row["num_workers"] if inside else "1")]
    sent = np.array([int(row["size"]) for row in chosen], float)
    measured = np.array([milliseconds(row, "send_recv") for row in chosen]) / 1e3
    features, fitted = np.stack([np.ones_like(sent), sent], 1), halves(len(chosen))
    latency, per_byte = fit_non_negative(features[fitted], measured[fitted])
    values = {"share": 1 / per_byte / link.bandwidth, "latency": latency}
    predicted = features[~fitted] @ np.array([latency, per_byte])
    return _fit(f"{link.name}, hop", values, predicted, measured[~fitted])


def evaluate_layers(rows: Sequence[Row], device: Device) -> Fit:
    """Predict the same linear layers by a device's measured products, which no row here has been fitted to."""
    predicted = []
    for row, (*_, elements, _) in zip(rows, layer_work(rows), strict=True):
        hidden, heads, kv_heads, ffn, count, tensor = (int(row[name]) for name in SHAPE)
        size = hidden // heads
        weights = [((heads + 2 * kv_heads) * size / tensor, hidden), (hidden, heads * size / tensor)]
        weights += [(2 * ffn / tensor, hidden), (hidden, ffn / tensor)]
        products = sum(float(on_line(count, *device.product_curve(n, k, 2))) for n, k in weights)
        beside = elements / (device.memory_bandwidth * (device.element_share or 1.0))
        predicted.append(products + beside + device.layer_seconds)
    measured = np.array([sum(milliseconds(row, name) for name in LAYER_OPERATORS) for row in rows]) / 1e3
    return _fit(
        f"{device.name}, measured products", {"layer_seconds": device.layer_seconds}, np.array(predicted), measured
    )


def calibrate(folder: Path) -> list[Fit]:
    """Fit all tables of a folder, named as in Vidur's repository.

    Raises:
      OSError: a file is missing.
      ValueError: a file lacks rows or a column; the message names both.
    """
    fits = []
    for name, tables in MLP_TABLES.items():
        rows = [row for table in tables for row in read_rows(folder / table, SHAPE, LAYER_OPERATORS)]
        fits += [fit_layers(rows, DEVICES[name])[1], evaluate_layers(rows, DEVICES[name])]
    for name, link in NVLINKS.items():
        table = folder / f"{name.lower()}_dgx_send_recv.csv"
        rows = read_rows(table, ("num_workers", "devices_per_node", "size"), ("send_recv",))
        fits.append(fit_hop(rows, LINKS[link], inside=True))
        fits.append(fit_hop(rows, LINKS[NETWORKS[name]], inside=False))
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
