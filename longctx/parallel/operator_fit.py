"""Fits a device's operators to tables of measured ones: CSV of products, attention and all-reduces, in milliseconds.

Columns are those of the tables that AIConfigurator collects. `longctx profile --import` and
`benchmarks.measured_operators` use it.
"""

import csv
import dataclasses
import gzip
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longctx.parallel.device_tables import Device, Link
from longctx.parallel.operators import (
    DECODE_HEADS,
    DECODE_KEYS,
    LATENCY,
    AttentionCost,
    ProductTable,
    ReduceTable,
    between_knots,
    on_line,
    product_physics,
)

ATTENTION = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype", "latency")
COLUMNS = {
    "products": ("gemm_dtype", "m", "n", "k", "latency"),
    "attention": ATTENTION,
    "all-reduces": ("num_gpus", "message_size", "latency"),
}
_TEXTS = {"gemm_dtype", "kv_cache_dtype", "attn_dtype", "kernel_source", "backend", "allreduce_dtype", "nccl_dtype"}
_TEXTS |= {"op_name"}
_DTYPES = {"bfloat16": ("bfloat16", 2), "float16": ("bfloat16", 2), "half": ("bfloat16", 2), "fp8": ("float8", 1)}
_DTYPES |= {"float8": ("float8", 1), "int8": ("float8", 1)}
# Knots are where kernels change, at the sizes of tiles, and else a factor of two to four apart.
ROWS = (1, 16, 17, 64, 65, 128, 129, 192, 256, 257, 512, 513, 1024, 2048, 4352, 16384)
SIZES = (32, 256, 1024, 2048, 4096, 8192, 16384)
MESSAGES = (*(256 * 4**power for power in range(8)), 2**23, 2**24, 2**26, 2**28, 2**30)  # at 8 MiB kernels change
_FLOOR = 0.02  # errors below which all rows weigh alike


class Table(NamedTuple):
    """A table: whether of products, attention or all-reduces, and its columns; `latency` is in seconds."""

    kind: str
    columns: Mapping[str, np.ndarray]

    def where(self, rows: np.ndarray) -> "Table":
        """Some of the rows."""
        return Table(self.kind, {name: column[rows] for name, column in self.columns.items()})

    def __len__(self) -> int:
        return len(self.columns["latency"])


def read_table(path: Path) -> Table:
    """Read a table, CSV or CSV in gzip; latencies are in milliseconds there.

    Raises:
      OSError: the file can't be read.
      ValueError: it has no rows, lacks a column, or a number is none; the message names the file and the column.
    """
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8", newline="")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8", newline="") as file
        ):
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, csv.Error) as error:
        raise ValueError(f"{path} is no table: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no rows")
    missing = {kind: [name for name in names if name not in rows[0]] for kind, names in COLUMNS.items()}
    kind = min(COLUMNS, key=lambda each: len(missing[each]) / len(COLUMNS[each]))
    if missing[kind]:
        wanted = "; ".join(f"{each}: {', '.join(names)}" for each, names in COLUMNS.items())
        raise ValueError(f"{path} must have the column {missing[kind][0]!r}, as tables have these columns: {wanted}")
    columns = {}
    for name in (*COLUMNS[kind], *(name for name in rows[0] if name in _TEXTS)):
        texts = [row[name] or "" for row in rows]
        columns[name] = np.array(texts) if name in _TEXTS else np.array([_number(path, name, text) for text in texts])
    if not (columns["latency"] > 0).all():
        raise ValueError(f"{path}: latency must be positive")
    columns["latency"] = columns["latency"] / 1e3
    for name in {"gemm_dtype", "kv_cache_dtype", "allreduce_dtype", "nccl_dtype"} & columns.keys():
        if unknown := {*columns[name].tolist()} - {*_DTYPES}:
            raise ValueError(f"{path}: {name} must be one of {', '.join(_DTYPES)}, got {min(unknown)!r}")
    return Table(kind, columns)


def joined(tables: Sequence[Table]) -> Table:
    """One table of the rows of several of one kind, of the columns that all have."""
    names = set.intersection(*({*table.columns} for table in tables))
    return Table(tables[0].kind, {name: np.concatenate([each.columns[name] for each in tables]) for name in names})


def _number(path: Path, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{path}: {name} must be a number that is not negative, got {text!r}")
    return value


def element_bytes(table: Table, name: str) -> np.ndarray:
    """Bytes of a number of each row, by the column of its dtype."""
    return np.array([_DTYPES[dtype][1] for dtype in table.columns[name].tolist()], float)


def check_units(table: Table, device: Device, link: Link | None, source: str) -> None:
    """Check that the best row reaches between a fiftieth and 1.3 times of a data sheet's rate.

    Raises:
      ValueError: it doesn't, as when latencies are seconds or microseconds; the message has the rate.
    """
    peak, c = device.flops["bfloat16"], table.columns
    if table.kind == "products":
        rates, sheet, unit = 2 * c["m"] * c["n"] * c["k"] / c["latency"], max(device.flops.values()), "FLOP/s"
    elif table.kind == "attention":
        pairs = np.where(c["step"] > 0, 0, c["batch_size"] * c["isl"] * (c["isl"] + 1) / 2)
        rates, sheet, unit = 4 * pairs * c["num_heads"] * c["head_dim"] / c["latency"], peak, "FLOP/s"
        if not pairs.any():
            keys = c["batch_size"] * (c["step"] + 1) * c["num_key_value_heads"] * c["head_dim"]
            rates, sheet, unit = 4 * keys / c["latency"], 4 * device.memory_bandwidth, "bytes/s"  # caches are faster
    else:
        if link is None:
            raise ValueError(f"{source} has all-reduces, and the topology has no link of the axis tensor")
        rates, sheet, unit = 2 * c["message_size"] / c["latency"], float(link.bandwidth), "bytes/s"
    best = float(rates.max())
    if not sheet / 50 < best < 1.3 * sheet:
        raise ValueError(
            f"{source}: latency must be in milliseconds of {device.name}: its best row of {table.kind} reaches "
            f"{best:.3g} {unit}, and the data sheet has {sheet:.3g}"
        )


def fit_products(table: Table, device: Device) -> dict[str, ProductTable]:
    """Fit a table of products for each dtype that there are rows of."""
    found = {}
    for dtype in dict.fromkeys(_DTYPES[name][0] for name in table.columns["gemm_dtype"].tolist()):
        rows = table.where(np.array([_DTYPES[name][0] == dtype for name in table.columns["gemm_dtype"].tolist()]))
        m, n, k = (rows.columns[name] for name in ("m", "n", "k"))
        wide = 1 if dtype == "float8" else 2
        physics = product_physics(m, n, k, wide, device.data_sheet_flops(wide), device.memory_bandwidth)
        knots = [
            [x for x in ROWS if x <= max(2, m.max())],
            *([x for x in SIZES if x <= max(64, y.max())] for y in (n, k)),
        ]
        sizes = max(knots[1:], key=len)
        ratios = _fit_grid((m, n, k), [knots[0], sizes, sizes], np.log(rows.columns["latency"] / physics))
        found[dtype] = ProductTable(tuple(knots[0]), tuple(sizes), tuple(np.round(100 * ratios).astype(int).tolist()))
    return found


def _fit_grid(
    points: tuple[np.ndarray, ...],
    knots: list[list[int]],
    values: np.ndarray,
    smoothness: float = 0.3,
    linear: Sequence[int] = (),
) -> np.ndarray:
    """Values at a grid's knots from which interpolation is close to those at the points, by least errors.

    It is linear in the axes of the numbers `linear`, and in the logarithm of others.
    """
    from scipy import sparse
    from scipy.sparse.linalg import lsqr

    count = len(values)
    index, weight = np.zeros((count, 1), int), np.ones((count, 1))
    for number, (point, axis) in enumerate(zip(points, knots, strict=True)):
        at, share = between_knots(point, axis, number in linear)
        index = np.concatenate([index * len(axis) + at[:, None], index * len(axis) + at[:, None] + 1], 1)
        weight = np.concatenate([weight * (1 - share)[:, None], weight * share[:, None]], 1)
    size = math.prod(map(len, knots))
    lines = np.repeat(np.arange(count), weight.shape[1])
    matrix = sparse.csr_matrix((weight.ravel(), (lines, index.ravel())), (count, size))
    grid, alike = np.arange(size).reshape([len(axis) for axis in knots]), []
    for number in range(len(knots)):
        moved = np.moveaxis(grid, number, 0)
        low, high = moved[:-1].ravel(), moved[1:].ravel()
        each = np.tile(np.arange(len(low)), 2)
        alike.append(sparse.csr_matrix((np.repeat([-1.0, 1.0], len(low)), (each, np.r_[low, high])), (len(low), size)))
    smooth = smoothness * sparse.vstack(alike)
    found, weights = np.zeros(size), np.ones(count)
    for _ in range(4):  # least absolute errors, by weighted least squares
        system = sparse.vstack([sparse.diags(weights) @ matrix, smooth])
        found = lsqr(system, np.r_[weights * values, np.zeros(smooth.shape[0])], iter_lim=400)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(matrix @ found - values), _FLOOR))
        weights /= weights.mean()
    return found


def product_seconds(tables: Mapping[str, ProductTable], table: Table, device: Device) -> np.ndarray:
    """Predict the seconds of each row of a table of products."""
    c, found = table.columns, np.empty(len(table))
    keys = np.stack([c["n"], c["k"], element_bytes(table, "gemm_dtype")], 1)
    for n, k, wide in np.unique(keys, axis=0):
        rows = (keys == (n, k, wide)).all(1)
        known = tables["float8" if wide == 1 else "bfloat16"]
        curve = known.curve(n, k, wide, device.data_sheet_flops(wide), device.memory_bandwidth)
        found[rows] = on_line(c["m"][rows], known.rows, curve)
    return found


def fit_attention(table: Table, device: Device) -> list[AttentionCost]:
    """Fit a kernel for each size of a head and bytes of a cached number, of rows of prompts and of decodes.

    Raises:
      ValueError: there are only prompts or only decodes of one of them.
    """
    c, wide = table.columns, element_bytes(table, "kv_cache_dtype")
    found = []
    for size, key_bytes in np.unique(np.stack([c["head_dim"], wide], 1), axis=0).tolist():
        rows = table.where((c["head_dim"] == size) & (wide == key_bytes))
        if rows.columns["step"].all() or not rows.columns["step"].any():
            raise ValueError(
                f"attention of heads of {size:g} with keys of {key_bytes:g} bytes must have rows of prompts (step 0) "
                "and of decodes"
            )
        found.append(_fit_kernel(rows, int(size), key_bytes, device))
    return found


_PROMPTS = ("latency", "prompt_share", "path", "path_seconds", "row", "row_head", "row_kv_head", "chunk_kv_head")
_DECODES = ("latency", "key_share", "decode_head", "decode_kv_head", "decode_overlap")
_BEGIN = {
    "latency": 1e-5,
    "prompt_share": 0.6,
    "path": 7e-9,
    "path_seconds": 6e-6,
    "row": 1e-9,
    "row_head": 3e-10,
    "row_kv_head": 3e-10,
}
_BEGIN |= {"chunk_kv_head": 2e-8, "key_share": 0.8, "decode_head": 2e-10, "decode_kv_head": 2e-8}
_BEGIN |= {"decode_overlap": 0.5}


def _fit_kernel(rows: Table, size: int, key_bytes: float, device: Device) -> AttentionCost:
    """Fit prompts and decodes, one after the other."""
    empty = AttentionCost(size, key_bytes, 0.5, 0.5)
    is_decode = rows.columns["step"] > 0
    prompts = _fit_numbers(empty, _PROMPTS, rows.where(~is_decode), device)
    decodes = _fit_numbers(empty, _DECODES, rows.where(is_decode), device)
    least = min(prompts["latency"], decodes["latency"])
    numbers = prompts | decodes | {"latency": least, "prompt_latency": _rounded(prompts["latency"] - least)}
    kernel, of_decodes = dataclasses.replace(empty, **numbers), rows.where(is_decode)
    c = of_decodes.columns
    points = c["batch_size"] * c["num_key_value_heads"], c["step"] + 1
    ratios = np.log(c["latency"] / attention_seconds(kernel, of_decodes, device))
    found = np.exp(_fit_grid(points, [[*DECODE_HEADS], [*DECODE_KEYS]], ratios, linear=(1,)))
    return dataclasses.replace(kernel, decode_ratios=tuple(np.round(100 * found).astype(int).tolist()))


def _fit_numbers(empty: AttentionCost, names: tuple[str, ...], rows: Table, device: Device) -> dict[str, Any]:
    from scipy.optimize import least_squares

    c, measured = rows.columns, rows.columns["latency"]
    bounds = {name: 1.0 if name.endswith(("share", "overlap")) else 1e3 for name in names}
    if "key_share" in names:  # which calls whose keys stay in caches would exceed; longer ones decide
        read = c["batch_size"] * (c["step"] + 1) * c["num_key_value_heads"] * 2 * c["head_dim"] * empty.key_bytes
        bounds["key_share"] = min(1.0, float((read / measured).max()) / device.memory_bandwidth)

    def numbers(logs: np.ndarray) -> dict[str, Any]:
        values = np.exp(logs)
        return {name: min(bounds[name], float(value)) for name, value in zip(names, values, strict=True)}

    def errors(logs: np.ndarray) -> np.ndarray:
        kernel = dataclasses.replace(empty, **numbers(logs))
        return np.log(attention_seconds(kernel, rows, device) / measured)

    begin = np.log([_BEGIN[name] for name in names])
    # Paths of a few microseconds, and such that grow with all of a prompt: the minimum has a kink between them.
    starts = [begin + [factor if name.startswith("path") else 0.0 for name in names] for factor in (0.0, 2.5)]
    solved = [
        least_squares(errors, start, loss="soft_l1", f_scale=0.05, bounds=(begin - 12, begin + 12))
        for start in (starts if "path" in names else starts[:1])
    ]
    return {name: _rounded(value) for name, value in numbers(min(solved, key=lambda each: each.cost).x).items()}


def _rounded(value: float) -> float:
    """Three digits."""
    return float(f"{value:.3g}")


def attention_seconds(kernel: AttentionCost, table: Table, device: Device) -> np.ndarray:
    """Predict the seconds of each row of a table of attention, all of one head's size and cached type."""
    c = table.columns
    count, tokens, heads, kv_heads = (c[name] for name in ("batch_size", "isl", "num_heads", "num_key_value_heads"))
    prompts = kernel.prompt_seconds(
        count * tokens * (tokens + 1) / 2, count * tokens, count, tokens, heads, kv_heads, device.flops["bfloat16"]
    )
    decodes = kernel.decode_seconds(count, count * (c["step"] + 1), heads, kv_heads, device.memory_bandwidth)
    return np.where(c["step"] > 0, decodes, kernel.latency + kernel.prompt_latency + prompts)


def message_bytes(table: Table) -> np.ndarray:
    """Bytes of each row's message, whose size these tables give in numbers of its dtype."""
    names = [name for name in ("allreduce_dtype", "nccl_dtype") if name in table.columns]
    wide = element_bytes(table, names[0]) if names else 1.0
    return table.columns["message_size"] * wide


def fit_all_reduces(table: Table, link: Link) -> ReduceTable:
    """Fit the all-reduces of each number of devices; those that run in a graph, where a table has both."""
    rows = all_reduces_of(table)
    sizes, found = message_bytes(rows), {}
    knots = [x for x in MESSAGES if x <= 2 * sizes.max()]
    for devices in np.unique(rows.columns["num_gpus"]).astype(int).tolist():
        chosen = rows.columns["num_gpus"] == devices
        physics = np.log(rows.columns["latency"][chosen] / (LATENCY + sizes[chosen] / link.bandwidth))
        ratios = np.exp(_fit_grid((sizes[chosen],), [knots], physics, 0.05))
        seconds = ratios * (LATENCY + np.array(knots) / link.bandwidth)
        found[devices] = tuple(_rounded(x) for x in np.maximum.accumulate(seconds).tolist())
    return ReduceTable(tuple(knots), found)


def all_reduces_of(table: Table) -> Table:
    """The rows of a table that are all-reduces, and of graphs where it has these."""
    c, chosen = table.columns, np.ones(len(table), bool)
    if "op_name" in c:
        chosen &= c["op_name"] == "all_reduce"
    if "backend" in c:
        graphs = np.char.endswith(c["backend"], "graph")
        chosen &= graphs | ~graphs.any()
    return table.where(chosen)


def fit_device(tables: Mapping[str, Table], device: Device, link: Link | None) -> tuple[Device, Link | None]:
    """Fit a device, and its link, to some tables, given by where they are from.

    Returns:
      The device with the operators that there are tables of, and the link with the all-reduces.

    Raises:
      ValueError: a table's unit is wrong, or rows are missing; the message names the table.
    """
    attention = []
    for source, table in tables.items():
        check_units(table, device, link, source)
        if table.kind == "products":
            device = dataclasses.replace(device, products=fit_products(table, device))
        elif table.kind == "attention":
            attention.append(table)
        elif link is not None:
            link = dataclasses.replace(link, all_reduces=fit_all_reduces(table, link))
    if attention:
        device = dataclasses.replace(device, attention=tuple(fit_attention(joined(attention), device)))
    return device, link


def prediction_errors(table: Table, device: Device, link: Link | None) -> np.ndarray:
    """Predicted seconds over measured, less 1, of each row that a device and a link are fitted to."""
    if table.kind == "products":
        return product_seconds(device.product_tables(), table, device) / table.columns["latency"] - 1
    if table.kind == "attention":
        found, wide = np.empty(len(table)), element_bytes(table, "kv_cache_dtype")
        kinds = np.stack([table.columns["head_dim"], wide], 1)
        for size, key_bytes in np.unique(kinds, axis=0).tolist():
            rows = (kinds == (size, key_bytes)).all(1)
            kernel = device.attention_cost(int(size), key_bytes)
            found[rows] = attention_seconds(kernel, table.where(rows), device)
        return found / table.columns["latency"] - 1
    rows = all_reduces_of(table)
    reduces = None if link is None else link.reduce_table
    if reduces is None:
        raise ValueError("all-reduces need a link that has them")
    sizes, devices = message_bytes(rows), rows.columns["num_gpus"].astype(int).tolist()
    found = np.array([reduces.reduce(size, count) for size, count in zip(sizes, devices, strict=True)])
    return found / rows.columns["latency"] - 1
