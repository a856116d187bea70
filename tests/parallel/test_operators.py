"""Measured operators: single measurements, more work never takes less time, and tables that are fitted or refused."""

import csv
import dataclasses
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import measured_operators
from longctx.cli import main
from longctx.models import LlamaConfig
from longctx.parallel import Topology
from longctx.parallel.device_tables import DEVICES, LINKS, Device, Link
from longctx.parallel.operator_fit import (
    SIZES,
    Table,
    check_units,
    fit_all_reduces,
    fit_attention,
    fit_products,
    prediction_errors,
    read_table,
)
from longctx.parallel.operators import (
    AttentionCost,
    ProductTable,
    ReduceTable,
    decode_ratio,
    on_line,
    product_physics,
)
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor import CurvePredictor, Work
from longctx.simulation.hardware import predictor
from longctx.simulation.models import MODELS

SHEET = Device("sheet", {"bfloat16": 900e12, "float8": 1800e12}, 3e12)
NVLINK = Link("nvlink", 450e9)
KERNEL = AttentionCost(128, 2, 0.65, 0.9, 1e-5, 1e-6, 6e-9, 8e-6, 1e-9, 3e-10, 4e-10, 2e-8, 2.5e-10, 2.5e-8, 0.6)


@pytest.mark.parametrize(
    ("device", "m", "n", "k", "wide", "microseconds"),
    [
        ("H100", 32, 8192, 8192, 2, 46.7),
        ("H100", 512, 8192, 8192, 2, 87.4),
        ("H100", 8192, 1024, 8192, 2, 168.9),
        ("H100", 128, 8192, 8192, 1, 32.5),
        ("H100", 4096, 16384, 4096, 1, 467.5),
        ("H200", 16384, 16384, 16384, 1, 6813.8),
        ("A100", 8192, 16384, 7168, 2, 6550.2),
    ],
)
def test_products_are_close_to_single_measurements(
    device: str, m: int, n: int, k: int, wide: int, microseconds: float
) -> None:
    rows, seconds = DEVICES[device].product_curve(n, k, wide)
    assert 1e6 * on_line(m, rows, seconds) == pytest.approx(microseconds, rel=0.15)


@pytest.mark.parametrize(
    ("device", "count", "tokens", "cached", "heads", "kv_heads", "microseconds"),
    [
        ("H100", 1, 2048, 0, 32, 8, 89.0),
        ("H100", 1, 4096, 0, 32, 8, 264.3),
        ("H100", 1, 16384, 0, 32, 8, 3310.4),
        ("H100", 8, 2048, 0, 8, 1, 160.2),
        ("A100", 1, 8192, 0, 32, 8, 2905.8),
        ("H100", 64, 1, 4095, 32, 8, 353.6),
        ("H100", 1, 1, 65535, 32, 8, 117.1),
        ("H100", 256, 1, 1, 32, 8, 66.5),
        ("H200", 64, 1, 8191, 32, 8, 490.8),
        ("H200", 8, 1, 131071, 8, 1, 143.4),
    ],
)
def test_attention_is_close_to_single_measurements(
    device: str, count: int, tokens: int, cached: int, heads: int, kv_heads: int, microseconds: float
) -> None:
    chosen = DEVICES[device]
    kernel = chosen.attention_cost(128, 2)
    if cached:
        seconds = kernel.decode_seconds(count, count * (cached + 1), heads, kv_heads, chosen.memory_bandwidth)
    else:
        pairs = count * tokens * (tokens + 1) / 2
        seconds = kernel.latency + kernel.prompt_latency
        seconds += kernel.prompt_seconds(
            pairs, count * tokens, count, tokens, heads, kv_heads, chosen.flops["bfloat16"]
        )
    assert 1e6 * seconds == pytest.approx(microseconds, rel=0.15)


@pytest.mark.parametrize(
    ("link", "devices", "num_bytes", "microseconds"),
    [
        ("nvlink-h100", 8, 2**24, 92.4),
        ("nvlink-h100", 2, 2**30, 3219.2),
        ("nvlink-h100", 8, 2**16, 6.4),
        ("nvlink-a100", 4, 2**28, 1920.7),
    ],
)
def test_all_reduces_are_close_to_single_measurements(
    link: str, devices: int, num_bytes: int, microseconds: float
) -> None:
    table = LINKS[link].reduce_table
    assert table is not None
    assert 1e6 * table.reduce(num_bytes, devices) == pytest.approx(microseconds, rel=0.08)


@given(
    device=st.sampled_from(["H100", "H200", "A100"]),
    sizes=st.tuples(st.integers(16, 10**5), st.integers(16, 10**5)),
    wide=st.sampled_from([1, 2]),
    rows=st.lists(st.integers(1, 10**5), min_size=2, max_size=20),
)
def test_more_rows_never_take_less_time(device: str, sizes: tuple[int, int], wide: int, rows: list[int]) -> None:
    knots, seconds = DEVICES[device].product_curve(*sizes, wide)
    found = on_line(np.sort(rows), knots, seconds)
    assert (np.diff(found) >= 0).all()
    assert found[0] > 0


PREDICTORS = {
    name: predictor(MODELS[model], topology, plan)
    for name, model, topology, plan in (
        ("8B", "llama-3-8b", "h100-nvlink", ParallelPlan()),
        ("70B", "llama-3-70b", "h200-nvlink", ParallelPlan(tensor=8)),
        ("405B", "llama-3-405b-fp8", "h100-rdma", ParallelPlan(stage=2, tensor=8)),
        ("A100", "llama-3-8b", "a100-nvlink", ParallelPlan(tensor=2)),
    )
}
CHUNKS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 5000), st.booleans()), max_size=6)


@given(name=st.sampled_from(sorted(PREDICTORS)), chunks=CHUNKS, start=st.integers(0, 10**7), count=st.integers(1, 8192))
def test_more_tokens_context_or_sequences_never_take_less_time(
    name: str, chunks: list[tuple[int, int, bool]], start: int, count: int
) -> None:
    found, work = PREDICTORS[name], Work.of(chunks)
    seconds = found.seconds(work)
    more = [work.with_chunk(start, count, False)]
    if count > 1:
        more += [work.with_chunk(start, count + 1, False), work.with_chunk(start + 1000, count + 1, False)]
    else:
        more += [work.with_chunk(start + 1000, 1, False), work.with_chunk(start + 1000, 1, True)]
    for each in more:
        assert found.seconds(each) >= seconds * (1 - 1e-12)
        seconds = found.seconds(each)


@given(name=st.sampled_from(sorted(PREDICTORS)), chunks=CHUNKS, start=st.integers(0, 10**7), count=st.integers(1, 8192))
def test_a_chunk_s_curve_equals_the_seconds_of_its_batch(
    name: str, chunks: list[tuple[int, int, bool]], start: int, count: int
) -> None:
    found, work = PREDICTORS[name], Work.of(chunks)
    expected = found.seconds(work.with_chunk(start, count, False))
    assert found.chunk_curve(work, start)(count) == expected


def test_a_layer_is_the_sum_of_its_operators() -> None:
    """Of Llama-3 8B on one H100: products, attention, element-wise operators, and the head."""
    model, device = LlamaConfig.preset("llama-3-8b"), DEVICES["H100"]
    found: CurvePredictor = PREDICTORS["8B"]
    kernel, layers = device.attention_cost(128, 2), 32
    products = 0.0
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        products += float(on_line(64, *device.product_curve(n, k, 2)))
    head = device.product_curve(model.vocab_size, 4096, 2)[1][0]
    elements = 2 * 64 * (10 * 4096 + 2 * 40 * 128 + 3 * 14336) / (0.77 * 3.35e12)
    layer = products + elements + device.layer_seconds
    attention = float(kernel.decode_seconds(64, 64 * 4096, 32, 8, device.memory_bandwidth))
    assert found.seconds(Work(64, 0, 64 * 4096)) == pytest.approx(layers * (layer + attention) + head, rel=1e-9)
    reads = 2 * (model.vocab_size * 4096 + layers * (2 * 40 * 128 + 3 * 14336) * 4096) / 3.35e12
    assert found.seconds(Work(1, 0, 1)) > reads  # of weights, by the data sheet


# Tables that are made from known numbers.
def rows_of_products(noise: float) -> list[dict[str, Any]]:
    rng, rows = np.random.default_rng(1), []
    for dtype, wide, ratio in (("bfloat16", 2, 1.4), ("fp8", 1, 1.7)):
        for m in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384):
            for n in SIZES:
                for k in (32, 512, 4096, 16384):
                    seconds = ratio * product_physics(m, n, k, wide, SHEET.data_sheet_flops(wide), 3e12)
                    seconds *= rng.uniform(1 - noise, 1 + noise)
                    rows.append({"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": 1e3 * seconds})
    return rows


def rows_of_attention() -> list[dict[str, Any]]:
    rows = []
    for heads, kv_heads in ((32, 8), (8, 1), (4, 4), (64, 8)):
        for count in (1, 4, 32):
            for tokens in (16, 128, 1024, 4096, 16384):
                about = {"batch_size": count, "num_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128}
                pairs = count * tokens * (tokens + 1) / 2
                seconds = KERNEL.prompt_seconds(pairs, count * tokens, count, tokens, heads, kv_heads, 900e12)
                seconds += KERNEL.latency + KERNEL.prompt_latency
                about["kv_cache_dtype"] = "bfloat16"
                rows.append(about | {"isl": tokens, "step": 0, "latency": 1e3 * seconds})
                seconds = KERNEL.decode_seconds(count, count * (tokens + 1), heads, kv_heads, 3e12)
                rows.append(about | {"isl": 1, "step": tokens, "latency": 1e3 * seconds})
    return rows


def rows_of_reduces() -> list[dict[str, Any]]:
    rows = []
    for devices in (2, 8):
        for power in range(7, 30):
            seconds = 2e-6 * devices + 2 * 2**power / 300e9
            for backend, factor in (("vllm_graph", 1), ("vllm_eager", 3)):
                row = {"allreduce_dtype": "bfloat16", "num_gpus": devices, "message_size": 2**power, "backend": backend}
                rows.append(row | {"latency": 1e3 * factor * seconds})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt", newline="") if path.suffix == ".gz" else path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.02), (0.05, 0.05)])
def test_made_up_products_are_found(tmp_path: Path, noise: float, within: float) -> None:
    table = read_table(write(tmp_path / "products.csv.gz", rows_of_products(noise)))
    found = fit_products(table, SHEET)
    for dtype, ratio, wide in (("bfloat16", 1.4, 2), ("float8", 1.7, 1)):
        for n, k in ((4096, 4096), (1000, 6000), (10**5, 50)):
            curve = found[dtype].curve(n, k, wide, SHEET.data_sheet_flops(wide), 3e12)
            flops = SHEET.data_sheet_flops(wide)
            expected = ratio * product_physics(np.array(found[dtype].rows, float), n, k, wide, flops, 3e12)
            np.testing.assert_allclose(curve, expected, rtol=within)
    device = dataclasses.replace(SHEET, products=found)
    assert np.abs(prediction_errors(table, device, None)).mean() < max(0.01, noise)


def test_made_up_attention_is_found(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "attention.csv", rows_of_attention()))
    (found,) = fit_attention(table, SHEET)
    assert {*found.decode_ratios} <= {*range(98, 103)}
    for name, value in dataclasses.asdict(dataclasses.replace(KERNEL, decode_ratios=found.decode_ratios)).items():
        if name == "decode_ratios":
            continue
        within = 0.05 if name.endswith(("share", "head", "latency")) else 0.5  # others trade with each other
        assert getattr(found, name) == pytest.approx(value, rel=within, abs=2e-6 if "latency" in name else 0), name
    device = dataclasses.replace(SHEET, attention=(found,))
    assert np.abs(prediction_errors(table, device, None)).mean() < 0.01


def test_decodes_that_are_no_closed_form_are_found(tmp_path: Path) -> None:
    """Few heads and short sequences take twice as long as the closed form of the others says."""
    rows = rows_of_attention()
    for row in rows:
        if row["step"] and row["batch_size"] * row["num_key_value_heads"] <= 16:
            row["latency"] *= 2
    (found,) = fit_attention(read_table(write(tmp_path / "attention.csv", rows)), SHEET)
    ratio = decode_ratio(found.decode_ratios, np.array([4, 256]), 4096)
    assert ratio[0] == pytest.approx(2 * ratio[1], rel=0.1)
    assert decode_ratio(found.decode_ratios, 8, 10**7) == decode_ratio(found.decode_ratios, 8, 131072)


@given(decodes=st.integers(1, 3000), keys=st.lists(st.integers(1, 10**9), min_size=1, max_size=20))
def test_an_array_of_decodes_takes_to_the_last_bit_what_each_takes(decodes: int, keys: list[int]) -> None:
    found = PREDICTORS["8B"]
    all_seconds = found.seconds(Work(decodes, decodes, np.array(keys)))  # type: ignore[arg-type]
    assert all_seconds.tolist() == [found.seconds(Work(decodes, decodes, each)) for each in keys]  # type: ignore[attr-defined]


@pytest.mark.parametrize("ratios", [(100,) * 71, (100,) * 71 + (0,)])
def test_ratios_of_decodes_are_checked(ratios: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="decode_ratios must be 72 positive numbers"):
        dataclasses.replace(KERNEL, decode_ratios=ratios)


def test_made_up_all_reduces_are_found(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "reduces.csv", rows_of_reduces()))
    found = fit_all_reduces(table, NVLINK)
    for devices in (2, 8):
        for num_bytes in (5000, 10**6, 10**8, 10**10):
            expected = 2e-6 * devices + num_bytes / 300e9  # of graphs
            assert found.reduce(num_bytes, devices) == pytest.approx(expected, rel=0.05)
    assert found.reduce(10**6, 4) == found.reduce(10**6, 8)


def changed(rows: list[dict[str, Any]], **columns: Any) -> list[dict[str, Any]]:
    """Rows with other values, or without a column whose value is None."""
    return [
        {name: value for name, value in (row | columns).items() if value is not None or name not in columns}
        for row in rows
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (changed(rows_of_products(0), k=None), r"table\.csv must have the column 'k', as tables have these columns: "),
        (changed(rows_of_attention(), step=None), "must have the column 'step'"),
        (changed(rows_of_reduces(), num_gpus=None), "must have the column 'num_gpus'"),
        (changed(rows_of_products(0), m="many"), "m must be a number that is not negative, got 'many'"),
        (changed(rows_of_products(0), latency="nan"), "latency must be a number that is not negative, got 'nan'"),
        (changed(rows_of_products(0), latency=0), "latency must be positive"),
        (changed(rows_of_products(0), gemm_dtype="int3"), "gemm_dtype must be one of bfloat16, .*, got 'int3'"),
    ],
)
def test_tables_that_are_none_are_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_table(write(tmp_path / "table.csv", rows))


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    for contents in (b"", b"m,n,k,gemm_dtype,latency\n"):
        file.write_bytes(contents)
        with pytest.raises(ValueError, match="has no rows"):
            read_table(file)
    for name, contents in (("table.csv", b"m\n\xff\n"), ("table.csv.gz", b"no gzip")):
        (tmp_path / name).write_bytes(contents)
        with pytest.raises(ValueError, match="is no table"):
            read_table(tmp_path / name)


@pytest.mark.parametrize("rows", [rows_of_products(0), rows_of_attention(), rows_of_reduces()])
@pytest.mark.parametrize("factor", [1e3, 1e-3])
def test_other_units_than_milliseconds_are_refused(tmp_path: Path, rows: list[dict[str, Any]], factor: float) -> None:
    right = read_table(write(tmp_path / "right.csv", rows))
    check_units(right, SHEET, NVLINK, "right.csv")
    wrong = Table(right.kind, {**right.columns, "latency": factor * right.columns["latency"]})
    with pytest.raises(ValueError, match=r"wrong\.csv: latency must be in milliseconds of sheet: its best row of"):
        check_units(wrong, SHEET, NVLINK, "wrong.csv")


def test_attention_without_decodes_is_refused(tmp_path: Path) -> None:
    rows = [row for row in rows_of_attention() if not row["step"]]
    with pytest.raises(ValueError, match=r"must have rows of prompts .* and of decodes"):
        fit_attention(read_table(write(tmp_path / "prompts.csv", rows)), SHEET)


@pytest.fixture
def sheet(tmp_path: Path) -> Path:
    path = tmp_path / "sheet.json"
    device = {"name": "sheet", "flops": dict(SHEET.flops), "memory_bandwidth": 3e12, "memory_bytes": 8e10}
    path.write_text(json.dumps({"device": device, "links": {"tensor": {"bandwidth": 450e9}}}))
    return path


def test_tables_are_imported_into_a_topology(tmp_path: Path, sheet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        write(tmp_path / f"{name}.csv.gz", rows)
        for name, rows in (
            ("products", rows_of_products(0)),
            ("attention", rows_of_attention()),
            ("reduces", rows_of_reduces()),
        )
    ]
    out = tmp_path / "mine.json"
    flags = [flag for file in files for flag in ("--import", str(file))]
    assert main(["profile", str(out), "--topology", str(sheet), *flags]) == 0
    assert "products.csv.gz: products, 616 rows, mean error" in capsys.readouterr().out
    found = Topology.from_file(out)
    assert isinstance(found.device.products, dict)
    assert found.device.attention[0].prompt_share == pytest.approx(0.65, rel=0.02)
    assert found.link("tensor").reduce_table is not None
    assert Topology.from_dict(found.to_dict()) == found
    before, after = (
        predictor(MODELS["llama-3-8b"], each, ParallelPlan(tensor=2)) for each in (Topology.from_file(sheet), found)
    )
    decode = Work(8, 8, 8 * 4096)
    assert after.seconds(decode) != before.seconds(decode)
    product = found.device.product_curve(4096, 4096, 2)[1][-1]
    assert product == pytest.approx(1.4 * product_physics(16384, 4096, 4096, 2, 900e12, 3e12), rel=0.02)


def refusals(folder: Path, sheet: Path) -> Iterator[tuple[list[str], str]]:
    """Flags of an import, and what is said about them."""
    products, none = write(folder / "products.csv", rows_of_products(0)), folder / "none.csv"
    none.write_text("")
    topology = ["--topology", str(sheet)]
    yield ["--import", str(products)], "--import needs --topology"
    yield [*topology, "--import", "/nowhere.csv"], "--import: no such file: /nowhere.csv"
    yield [*topology, "--import", str(none)], f"--import: {none} has no rows"
    yield ["--topology", "cpu", "--import", str(products)], "latency must be in milliseconds of cpu"


def test_imports_that_can_not_be_are_refused(tmp_path: Path, sheet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in refusals(tmp_path, sheet):
        assert main(["profile", str(tmp_path / "out.json"), *flags]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ProductTable((1, 2), (8, 16), (0,) * 7), "ratios of products must be 8"),
        (lambda: ProductTable((2, 1), (8, 16), (0,) * 8), "knots of products must be positive and ascend"),
        (lambda: dataclasses.replace(KERNEL, row=-1.0), "row of attention must be finite and not negative"),
        (lambda: dataclasses.replace(KERNEL, key_share=1.1), "key_share of attention must be"),
        (lambda: ReduceTable((1, 2), {2: (1.0,)}), "all-reduces must have positive numbers that ascend"),
        (lambda: ReduceTable((1, 2), {}), "all-reduces must be of some number of devices"),
        (lambda: dataclasses.replace(SHEET, products="B100"), "products must be one of H100, H200, A100, or given"),
        (lambda: dataclasses.replace(SHEET, attention="B100"), "attention must be one of H100, H200, A100, or given"),
        (lambda: dataclasses.replace(NVLINK, all_reduces="pcie"), "all_reduces must be one of nvlink-h100, "),
        (lambda: dataclasses.replace(SHEET, products={}), "products must have bfloat16"),
        (lambda: dataclasses.replace(SHEET, attention=({"row": 1.0},)), "a AttentionCost has wrong attributes"),
        (lambda: SHEET.product_curve(1, 1, 2), "sheet has no measured products"),
    ],
)
def test_operators_that_are_none_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


MEASURED = Path(__file__).parents[3] / "shared" / "data" / "h100_measured"


@pytest.mark.slow
@pytest.mark.skipif(not MEASURED.is_dir(), reason=f"the measured tables are not at {MEASURED}")
def test_stored_operators_are_what_is_fitted() -> None:
    """On rows that no fit has seen, products are within 7.5 %, all-reduces 6.5 %, and attention on Hopper 10 %."""
    for name in measured_operators.SYSTEMS:
        found, errors = measured_operators.of_products(MEASURED, name)
        assert max(each.error for each in errors) < 0.075
        assert {dtype: ProductTable(**table) for dtype, table in found.items()} == dict(DEVICES[name].product_tables())
    for link in measured_operators.REDUCES:
        reduces, errors = measured_operators.of_all_reduces(MEASURED, link)
        assert ReduceTable(**reduces) == LINKS[link].reduce_table
        assert errors[0].error < 0.065
    kernels, errors = measured_operators.of_attention(MEASURED, "H100", "vllm")
    assert kernels == [DEVICES["H100"].attention_cost(each.head_size, each.key_bytes) for each in kernels]
    assert max(each.error for each in errors) < 0.1
