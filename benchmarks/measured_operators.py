"""Fits devices to measured operators, and their errors: `python -m benchmarks.measured_operators FOLDER [--write]`.

FOLDER has tables as AIConfigurator collects them, `<system>.<engine>.<operator>.csv.gz`. A random half of the rows of
each is fitted, the other half evaluates. `--write` stores what was fitted in
`longctx/parallel/operators.json`.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from longctx.parallel import operator_fit
from longctx.parallel.device_tables import DEVICES, LINKS
from longctx.parallel.operator_fit import Table, element_bytes, read_table

# The engine whose tables a device is fitted to: FlashAttention-3's and, on A100, FlashAttention-2's kernels.
SYSTEMS = {"H100": ("h100_sxm", "vllm"), "H200": ("h200_sxm", "vllm"), "A100": ("a100_sxm", "sglang")}
# Devices with tables of products and links with tables of all-reduces, of vLLM in all systems.
REDUCES = {"nvlink-h100": "h100_sxm", "nvlink-a100": "a100_sxm"}
OTHER_KERNELS = {"H100": ("sglang", "trtllm")}
ROW_RANGES = ((1, 16), (17, 64), (65, 256), (257, 1024), (1025, 4353), (4354, 16384))
PROMPT_RANGES = ((1, 128), (129, 512), (513, 2048), (2049, 8192), (8193, 16384))
DECODE_RANGES = ((1, 128), (129, 1024), (1025, 8192), (8193, 32768), (32769, 131072))
BYTE_RANGES = ((256, 2**16), (2**16 + 1, 2**20), (2**20 + 1, 2**24), (2**24 + 1, 2**31))


class Errors(NamedTuple):
    """Errors of an operator on rows that no fit has seen.

    Attributes:
      device, operator: of what. rows: how many evaluate.
      error: mean of |predicted / measured - 1|.
      by_range: of rows, tokens or bytes: first and last, the error, and the mean of predicted / measured - 1.
    """

    device: str
    operator: str
    rows: int
    error: float
    by_range: list[tuple[int, int, float, float]]


def halves(count: int) -> np.ndarray:
    """Which of so many rows are fitted, `[count]` bool; the others evaluate."""
    return np.random.default_rng(0).random(count) < 0.5


def errors(
    device: str,
    operator: str,
    predicted: np.ndarray,
    measured: np.ndarray,
    size: np.ndarray,
    ranges: Sequence[tuple[int, int]],
) -> Errors:
    """Errors of predictions `[rows]`, over all and by range of `size`."""
    off = predicted / measured - 1
    by_range = []
    for low, high in ranges:
        within = (size >= low) & (size <= high)
        if within.any():
            by_range.append((low, high, float(np.abs(off[within]).mean()), float(off[within].mean())))
    return Errors(device, operator, len(off), float(np.abs(off).mean()), by_range)


def of_products(folder: Path, name: str) -> tuple[dict[str, object], list[Errors]]:
    """Fit a device's products, and evaluate them by dtype and rows."""
    device = DEVICES[name]
    table = read_table(folder / f"{SYSTEMS[name][0]}.vllm.gemm.csv.gz")
    fitted = halves(len(table))
    found = operator_fit.fit_products(table.where(fitted), device)
    others = table.where(~fitted)
    predicted, wide = operator_fit.product_seconds(found, others, device), element_bytes(others, "gemm_dtype")
    large = (others.columns["n"] >= 512) & (others.columns["k"] >= 512)
    results = []
    for dtype, size in (("bfloat16", 2), ("float8", 1)):
        for operator, chosen in ((dtype, wide == size), (f"{dtype}, n, k >= 512", (wide == size) & large)):
            if chosen.any():
                seconds, rows = others.columns["latency"][chosen], others.columns["m"][chosen]
                results.append(errors(name, f"products, {operator}", predicted[chosen], seconds, rows, ROW_RANGES))
    return {dtype: dataclasses.asdict(each) for dtype, each in found.items()}, results


def of_attention(folder: Path, name: str, engine: str) -> tuple[list[operator_fit.AttentionCost], list[Errors]]:
    """Fit a device's kernels of attention, and evaluate them for prompts and decodes."""
    device, system = DEVICES[name], SYSTEMS[name][0]
    parts = [read_table(folder / f"{system}.{engine}.{each}_attention.csv.gz") for each in ("context", "generation")]
    table = operator_fit.joined(parts)
    fitted = halves(len(table))
    fit_rows = table.where(fitted)
    has_both = {}
    for each in np.unique(table.columns["kv_cache_dtype"]).tolist():
        steps = table.columns["step"][table.columns["kv_cache_dtype"] == each]
        has_both[each] = bool(steps.any() and not steps.all())
    keep = np.array([has_both[each] for each in fit_rows.columns["kv_cache_dtype"].tolist()])
    kernels = operator_fit.fit_attention(fit_rows.where(keep), device)
    others = table.where(~fitted)
    results = []
    for kernel in kernels:
        wide = element_bytes(others, "kv_cache_dtype")
        rows = others.where((others.columns["head_dim"] == kernel.head_size) & (wide == kernel.key_bytes))
        predicted = operator_fit.attention_seconds(kernel, rows, device)
        is_decode = rows.columns["step"] > 0
        about = f"heads of {kernel.head_size}, keys of {kernel.key_bytes:g} B"
        for operator, chosen, size, ranges in (
            ("prompts", ~is_decode, rows.columns["isl"], PROMPT_RANGES),
            ("decodes", is_decode, rows.columns["step"] + 1, DECODE_RANGES),
        ):
            seconds = rows.columns["latency"][chosen]
            of = f"{operator}, {engine}, {about}"
            results.append(errors(name, of, predicted[chosen], seconds, size[chosen], ranges))
    return kernels, results


def of_all_reduces(folder: Path, link: str) -> tuple[dict[str, object], list[Errors]]:
    """Fit a link's all-reduces in graphs, and evaluate them by bytes, and against NCCL's."""
    system = REDUCES[link]
    table = operator_fit.all_reduces_of(read_table(folder / f"{system}.vllm.custom_allreduce.csv.gz"))
    fitted = halves(len(table))
    found = operator_fit.fit_all_reduces(table.where(fitted), LINKS[link])
    results = []
    for name, rows in (("graphs", table.where(~fitted)), ("NCCL", _nccl(folder, system))):
        sizes, devices = operator_fit.message_bytes(rows), rows.columns["num_gpus"]
        predicted = np.array([found.reduce(size, int(count)) for size, count in zip(sizes, devices, strict=True)])
        results.append(errors(link, f"all-reduces, {name}", predicted, rows.columns["latency"], sizes, BYTE_RANGES))
    return dataclasses.asdict(found), results


def _nccl(folder: Path, system: str) -> Table:
    rows = operator_fit.all_reduces_of(read_table(folder / f"{system}.nccl.csv.gz"))
    return rows.where(rows.columns["nccl_dtype"] == "half")


def of_collectives(folder: Path, link: str) -> tuple[float, float, Errors]:
    """Fit the share and latency of a link's other collectives, in which a device sends (n - 1) / n of the bytes."""
    table = read_table(folder / f"{REDUCES[link]}.nccl.csv.gz")
    table = table.where((table.columns["op_name"] != "all_reduce") & (table.columns["nccl_dtype"] == "half"))
    devices = table.columns["num_gpus"]
    sent, seconds = operator_fit.message_bytes(table) * (devices - 1) / devices, table.columns["latency"]
    fitted = halves(len(table))
    features = np.stack([np.ones_like(sent), sent], 1)
    numbers = np.linalg.lstsq((features / seconds[:, None])[fitted], np.ones(int(fitted.sum())), rcond=None)[0]
    found = errors(
        link, "other collectives", (features @ numbers)[~fitted], seconds[~fitted], sent[~fitted], BYTE_RANGES
    )
    return float(numbers[0]), float(1 / numbers[1] / LINKS[link].bandwidth), found


def launch_seconds(folder: Path) -> Iterator[tuple[str, float, float]]:
    """By system: seconds of the shortest product, a kernel in a graph, and of an eager launch beside a graph's."""
    for system, engine in dict.fromkeys((system, "vllm") for system, _ in SYSTEMS.values()):
        products = read_table(folder / f"{system}.{engine}.gemm.csv.gz")
        table = read_table(folder / f"{system}.{engine}.custom_allreduce.csv.gz")
        small = table.where(table.columns["message_size"] <= 4096)
        graph = np.char.endswith(small.columns["backend"], "graph")
        seconds = small.columns["latency"]
        eager = float(np.median(seconds[~graph]) - np.median(seconds[graph]))
        yield system, float(np.percentile(products.columns["latency"], 1)), eager


def main(arguments: Sequence[str] | None = None, show: Callable[[str], object] = print) -> None:
    """Print errors on held-out rows, and with `--write` store what was fitted."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    write = "--write" in given
    given = [each for each in given if each != "--write"]
    if len(given) != 1:
        raise SystemExit("usage: python -m benchmarks.measured_operators FOLDER [--write]")
    folder, results = Path(given[0]), []
    stored: dict[str, dict[str, object]] = {"products": {}, "attention": {}, "all_reduces": {}}
    for name, (_, engine) in SYSTEMS.items():
        stored["products"][name], found = of_products(folder, name)
        results += found
        for each in (engine, *OTHER_KERNELS.get(name, ())):
            kernels, found = of_attention(folder, name, each)
            if each == engine:
                stored["attention"][name] = [dataclasses.asdict(kernel) for kernel in kernels]
            results += found
    for link in REDUCES:
        stored["all_reduces"][link], found = of_all_reduces(folder, link)
        results += found
    for link in REDUCES:
        latency, share, found_errors = of_collectives(folder, link)
        results.append(found_errors)
        show(f"{link}: collectives but all-reduces take {1e6 * latency:.1f} us and reach {share:.2f} of the bandwidth")
    for system, shortest, eager in launch_seconds(folder):
        show(f"{system}: a kernel in a graph takes {1e6 * shortest:.2f} us, an eager launch {1e6 * eager:.1f} us more")
    show("")
    show("| of | operator | rows | error | by range: error (bias) |")
    show("|---|---|---|---|---|")
    for each in results:
        ranges = "; ".join(
            f"{low:,}-{high:,}: {100 * off:.1f} % ({100 * bias:+.0f})" for low, high, off, bias in each.by_range
        )
        show(f"| {each.device} | {each.operator} | {each.rows:,} | {100 * each.error:.1f} % | {ranges} |")
    if write:
        text = json.dumps(stored, separators=(",", ":")).replace(',"', ',\n"')
        (Path(operator_fit.__file__).parent / "operators.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
