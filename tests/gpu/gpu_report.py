"""The page of a run: `python tests/gpu/gpu_report.py RESULTS.json PAGE.md`; it needs nothing but Python.

A run that was cut off has a page too, which lists what was not run. A rehearsal has none: its figures are of a CPU.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_cases import STAGES

Record = dict[str, Any]
LEAST_OF_COPY = 0.8
OURS = "attention"
_NONE = """No run has been made on a GPU yet: there are no figures.

```sh not-run: needs a GPU
make gpu-check     # ten minutes; results in build/gpu/gpu.json
make gpu-report    # writes this page from them
```

Predictions for this page to be compared with are in [Kernels for H100](kernels_h100.md). What each stage of a run
does, and for how long: [Run on a GPU](../how_to/run_on_a_gpu.md)."""


def render(record: Record | None) -> str:
    """The page of a run; of none, a page that says so."""
    parts = ["# Measured on a GPU"]
    if record is None:
        return "\n\n".join([*parts, _NONE]) + "\n"
    versions = _figures(record, "device/versions")
    parts.append(_about(record, versions))
    if flagged := list(flags(record)):
        parts.append("**To look at:**\n\n" + "\n".join(f"- {flag}" for flag in flagged))
    parts += [_summary(record), *_failures(record), *_not_run(record)]
    parts += [*_correct(record), *_kernels(record, versions), *_engine(record), *_pages(record), *_rings(record)]
    return "\n\n".join(parts) + "\n"


def flags(record: Record) -> Iterator[str]:
    """Figures that say that something is wrong, though no case failed by them."""
    copy = _figures(record, "kernels/copy").get("bytes_per_second")
    step = _figures(record, "engine/decode-b1")
    if step.get("step_seconds") and copy and (share := _read_rate(step) / copy) < LEAST_OF_COPY:
        yield (
            f"A decode of one sequence reads its weights at {share:.0%} of a copy's bandwidth, below "
            f"{LEAST_OF_COPY:.0%}: look in the profile for copies of weights within a step."
        )
    for batch in ("b1", "b64"):
        launches = _figures(record, f"engine/decode-{batch}").get("a_step", {}).get("graph_launches")
        if launches is not None and (launches < 0.5 or launches > 2):
            yield f"A step of decode-{batch} launches {launches:.1f} graphs instead of one."
    limits = _figures(record, "device/versions").get("limits", {})
    for row in _timed(record):
        share = _of_limit(row, limits)
        if share is not None and share > 1:
            yield (
                f"{row['case']}, {row['contender']}: {share:.0%} of what the device can do by its data sheet: "
                "that figure is not to be believed."
            )


def _figures(record: Record, case: str) -> dict[str, Any]:
    figures: dict[str, Any] = record["cases"].get(case, {}).get("figures", {})
    return figures


def _read_rate(step: dict[str, Any]) -> float:
    return float((step["weight_bytes"] + step["cache_bytes"]) / step["step_seconds"])


def _timed(record: Record) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for case, result in record["cases"].items():
        if result["stage"] == "kernels":
            rows += _figures(record, case).get("results", [])
    return rows


def _of_limit(row: dict[str, Any], limits: dict[str, float]) -> float | None:
    """The least time that the device needs by its data sheet, over the measured one."""
    if not limits or row["ms"] is None:
        return None
    return float(max(row["flops"] / limits["flops"], row["bytes"] / limits["bytes"]) / row["ms"] * 1e3)


def _about(record: Record, versions: dict[str, Any]) -> str:
    known = {
        "device": versions.get("device", "unknown"),
        "GPUs": versions.get("devices"),
        "date": record["began"],
        "driver": versions.get("driver"),
        "ptxas": versions.get("ptxas"),
        "Python": versions.get("python"),
        "JAX": versions.get("jax"),
        "jaxlib": versions.get("jaxlib"),
        "platform": versions.get("platform"),
        "attention by itself takes": versions.get("attention"),
    }
    rows = [f"| {name} | {value} |" for name, value in known.items() if value]
    how = "It ran to its end" if record["finished"] else "It was cut off before its end"
    seconds = f" in {record['seconds']:.0f} s" if record.get("seconds") else ""
    said = f"By `make gpu-check`, a run of {record['minutes']:g} minutes. {how}{seconds}."
    return f"{said}\n\n" + "\n".join(["| | |", "|---|---|", *rows])


def _summary(record: Record) -> str:
    lines = ["| stage | passed | not passed | not run |", "|---|---|---|---|"]
    for stage, (_, about) in STAGES.items():
        found = [x["status"] for x in record["cases"].values() if x["stage"] == stage]
        absent = sum(x in ("not run", "skipped") for x in found)
        passed = found.count("passed")
        lines.append(f"| {about} | {passed} | {len(found) - passed - absent} | {absent} |")
    return "\n".join(lines)


def _failures(record: Record) -> list[str]:
    bad = {k: x for k, x in record["cases"].items() if x["status"] in ("failed", "hung", "crashed")}
    rows = [f"- `{case}` {x['status']}: {_one_line(x['reason'])}" for case, x in bad.items()]
    return ["## Not passed", "\n".join(rows)] if rows else []


def _not_run(record: Record) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for case, result in record["cases"].items():
        if result["status"] in ("not run", "skipped"):
            reasons.setdefault(_one_line(result["reason"]), []).append(f"`{case}`")
    rows = [f"- {reason}: {', '.join(cases)}" for reason, cases in reasons.items()]
    return ["## Not run", "\n".join(rows)] if rows else []


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _correct(record: Record) -> list[str]:
    rows = []
    for case, result in record["cases"].items():
        figures = result.get("figures", {})
        if result["status"] == "passed" and "error" in figures and result["stage"] in ("device", "correct"):
            rows.append(f"| `{case}` | {figures['error']:.1e} | {figures['allowed']:.1e} | {result['seconds']:.1f} |")
    if not rows:
        return []
    about = "Largest errors against the dense oracle in float32, and those that were allowed."
    return ["## Against the oracle", about, "\n".join(["| case | error | allowed | s |", "|---|---|---|---|", *rows])]


def _kernels(record: Record, versions: dict[str, Any]) -> list[str]:
    rows, missing = [], dict[str, list[str]]()
    by_case: dict[str, list[dict[str, Any]]] = {}
    for row in _timed(record):
        by_case.setdefault(row["case"], []).append(row)
    for case, of_case in by_case.items():
        ours = next((x["ms"] for x in of_case if x["contender"] == OURS), None)
        for row in of_case:
            if row["ms"] is None:
                missing.setdefault(f"{row['contender']}: {_one_line(row['reason'])}", []).append(f"`{case}`")
                continue
            share = _of_limit(row, versions.get("limits", {}))
            cells = [
                f"{row['ms']:.4g}",
                f"{row['flops'] / row['ms'] / 1e9:.0f}",
                f"{row['bytes'] / row['ms'] / 1e9:.2f}",
            ]
            cells.append("-" if share is None else f"{share:.0%}")
            cells.append("-" if ours is None else f"{row['ms'] / ours:.2f}")
            rows.append(f"| `{case}` | {row['contender']} | {' | '.join(cells)} | {row['error']:.1e} |")
    copy = _figures(record, "kernels/copy").get("bytes_per_second")
    if not rows and copy is None:
        return []
    parts = ["## Kernels"]
    if copy is not None:
        parts.append(f"A copy of 4 GB reads and writes {copy / 1e12:.2f} TB/s.")
    if rows:
        parts.append(
            "Roofline: the least time for the operations and bytes by the device's data sheet, over the measured one. "
            "In chunks and decodes, cuDNN and attention_mgpu see all keys, without a mask."
        )
        head = "| case | contender | ms | TFLOP/s | TB/s | of the roofline | time / ours | error |"
        parts.append("\n".join([head, "|" + "---|" * 8, *rows]))
    if missing:
        parts.append("Not timed:\n\n" + "\n".join(f"- {why}. {', '.join(cases)}" for why, cases in missing.items()))
    return parts


def _engine(record: Record) -> list[str]:
    copy = _figures(record, "kernels/copy").get("bytes_per_second")
    rows, longest = [], []
    for name in ("decode-b1", "decode-b64"):
        step = _figures(record, f"engine/{name}")
        if "step_seconds" not in step:
            continue
        rate, a_step = _read_rate(step), step.get("a_step", {})
        cells = [f"{step['step_seconds'] * 1e3:.3f}", f"{step['tokens_per_second']:.0f}", f"{rate / 1e12:.2f}"]
        cells.append(f"{rate / copy:.0%}" if copy else "-")
        cells += [f"{a_step[x]:.1f}" if x in a_step else "-" for x in ("graph_launches", "kernel_launches")]
        rows.append(f"| {name} | {' | '.join(cells)} |")
        for kernel, us in step.get("longest_us_a_step", {}).items():
            longest.append(f"| {name} | `{kernel}` | {us:.0f} |")
    parts = []
    if rows:
        about = (
            "8 layers of Llama-3 8B with random weights, bfloat16; decodes after 1,024 tokens. Bytes: weights and keys."
        )
        head = "| batch | ms a step | tokens/s | TB/s | of a copy | graph launches a step | kernel launches a step |"
        parts += [about, "\n".join([head, "|" + "---|" * 7, *rows])]
    if longest:
        parts.append("\n".join(["| batch | kernel | us a step |", "|---|---|---|", *longest]))
    if "tokens_per_second" in (prefill := _figures(record, "engine/prefill")):
        parts.append(f"A prompt of 8,192 tokens in chunks of 2,048: {prefill['tokens_per_second']:,.0f} tokens/s.")
    if tokens := _figures(record, "engine/tokens"):
        parts.append(
            f"Greedy tokens: {tokens['equal']} of {tokens['sequences']} sequences are equal to those by "
            f'`implementation="xla"`; the logits of the others were at most {tokens["largest_gap"]:.1e} apart.'
        )
    return ["## Engine", *parts] if parts else []


def _pages(record: Record) -> list[str]:
    lines = []
    if "read_seconds" in (moved := _figures(record, "pages/transfers")):
        rates = (moved["bytes"] / moved[f"{way}_seconds"] / 1e9 for way in ("read", "write"))
        lines.append("- Pages to the host {:.1f} GB/s, and back {:.1f} GB/s.".format(*rates))
    if seconds := _figures(record, "pages/sampling").get("step_seconds"):
        times = ", ".join(f"{name} {value * 1e3:.3f} ms" for name, value in seconds.items())
        lines.append(f"- A step of 64 decodes: {times}.")
    if "pages" in (memory := _figures(record, "pages/memory")):
        used = [f"{memory[x] / 1e9:.1f} GB {x.split('_')[0]}" for x in ("limit_bytes", "peak_bytes") if memory.get(x)]
        lines.append(f"- Default pages: {memory['pages']:,}, for {memory['tokens']:,} tokens; {', '.join(used)}.")
    return ["## Pages, sampling, memory", "\n".join(lines)] if lines else []


def _rings(record: Record) -> list[str]:
    rows = []
    for case, result in record["cases"].items():
        seconds = result.get("figures", {}).get("seconds") if result["stage"] == "rings" else None
        for name, value in (seconds or {}).items():
            ideal = seconds["one device"] / record["cases"][case]["figures"]["ranks"]
            rows.append(f"| `{case}` | {name} | {value * 1e3:.2f} | {ideal / value:.0%} |")
    head = "| case | exchange | ms | of the ideal |\n|---|---|---|---|"
    about = "128k tokens, 32 query and 8 KV heads of 128. Ideal: one device's time, shared by all."
    return ["## Several GPUs", about, "\n".join([head, *rows])] if rows else []


def main() -> None:
    results, page = map(Path, sys.argv[1:3])
    if not results.exists():
        raise SystemExit(f"{results} must be what make gpu-check writes: there is none")
    record = json.loads(results.read_text(encoding="utf-8"))
    if record["rehearsal"]:
        raise SystemExit(f"{results} must be of a run on a GPU, got a rehearsal")
    page.write_text(render(record), encoding="utf-8")


if __name__ == "__main__":
    main()
