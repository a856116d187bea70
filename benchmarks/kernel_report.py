"""What `benchmarks.kernels` measured: a table, why something is missing from it, and the aims."""

import datetime
import json
import math
import platform
import subprocess
from dataclasses import dataclass
from typing import Any

import jax
import jaxlib

from benchmarks.h100_limits import floor
from benchmarks.kernel_cases import MAX_ERROR, ZIGZAG_DENSE, ZIGZAG_KEYS, Case
from benchmarks.kernel_contenders import OURS, PAGE_SIZES, peers

PEERS = tuple(peers())
_NOTES = """Peers: ms (their time / ours). XLA is our own in XLA. The floor is that of `--model`. Error: relative to the
largest entry of the same row. In chunks cuDNN, jax.nn and torch see all keys, the last ones too: their causal masks
begin with the first key. Ours and XLA compute block ranges from the positions in every call."""


@dataclass
class Result:
    """Of one contender in one case; of all of them where the case was left out and `contender` is empty."""

    case: Case
    contender: str
    ms: float | None = None
    error: float | None = None  # relative, as `relative_error` has it
    rounds: int = 0
    passes: int = 0  # a round, over all sets of operands
    reason: str = ""  # why there is no time

    @property
    def failed(self) -> bool:
        return self.error is not None and self.error > MAX_ERROR

    @property
    def flops_per_second(self) -> float | None:
        return None if self.ms is None else self.case.flops / self.ms * 1e3

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.ms is None else self.case.bytes / self.ms * 1e3

    @property
    def of_floor(self) -> float | None:
        return None if self.ms is None else floor(self.case.flops, self.case.bytes).ms / self.ms


@dataclass(frozen=True)
class Aim:
    name: str
    limit: float
    at_least: bool
    unit: str
    measured: float | None

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        met = self.measured >= self.limit if self.at_least else self.measured <= self.limit
        return "met" if met else "missed"


def aims(results: list[Result], copy: float) -> list[Aim]:
    """Those of the project, on what was measured. A part that is missing leaves an aim unmeasured."""
    found = {(r.case.name, r.contender): r for r in results if r.ms is not None}

    def ms(case: str, contender: str = OURS) -> float | None:
        return found[case, contender].ms if (case, contender) in found else None

    def ratio(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a / b

    prefill, chunk = "mha/tp1/prefill@16k", "llama3-70b/tp8/chunk{}@1m"
    flops = found[prefill, OURS].flops_per_second if (prefill, OURS) in found else None
    few = ratio(ms(chunk.format(64)), ms(chunk.format(2048)))
    aims = [
        Aim("prefill, causal, bf16, H = 128, 16k", 560, True, " TFLOP/s", ratio(flops, 1e12)),
        Aim("the same, cuDNN's time / ours", 1, True, "x", ratio(ms(prefill, "cuDNN"), ms(prefill))),
        Aim("time per token, chunk of 64 / of 2,048, 1M cached, 70B TP8", 1.15, False, "x", few and few * 2048 / 64),
    ]
    for batch in (1, 32):
        decode = found.get((f"llama3-8b/tp1/decode@128k/b{batch}", OURS))
        part = None if decode is None else ratio(decode.bytes_per_second, copy / 100)
        aims.append(Aim(f"decode, K = 8, S = 131,072, batch {batch}: of the copy's bandwidth", 85, True, " %", part))
    for size in PAGE_SIZES:
        pages = f"pages of {size}"
        slower = [ratio(r.ms, ms(name)) for (name, contender), r in found.items() if contender == pages]
        worst = max((x for x in slower if x is not None), default=None)
        aims.append(Aim(f"pages of {size} / contiguous, worst case", 1.05, False, "x", worst))
    dense = found.get((ZIGZAG_DENSE, OURS))
    zigzag = [found.get((name, OURS)) for name in ZIGZAG_KEYS]
    worst = None
    if dense is not None and all(zigzag):
        per_flop = [ratio(r.ms, r.case.flops) for r in (dense, *zigzag) if r is not None]
        worst = ratio(max(x for x in per_flop[1:] if x is not None), per_flop[0])
    aims.append(Aim("zigzag, half masked / dense of the same FLOPs, worst hop", 1.1, False, "x", worst))
    return aims


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _row(result: Result, peers: dict[str, Result], copy: float) -> str:
    decode = result.case.shape.kind == "decode"
    rate = result.bytes_per_second if decode else result.flops_per_second
    cells = [
        result.case.name,
        result.contender,
        "FAILED" if result.failed else _cell(result.ms, "{:.4g}"),
        _cell(rate and rate / 1e12, "{:.2f} TB/s" if decode else "{:.0f} TFLOP/s"),
        _cell(result.of_floor, "{:.0%}"),
        _cell(rate and rate / copy, "{:.0%}") if decode else "",
    ]
    for name in PEERS:
        peer = peers.get(name)
        if peer is None or peer.ms is None:
            cells.append("FAILED" if peer and peer.failed else "-")
        else:
            cells.append(f"{peer.ms:.4g}" + (f" ({peer.ms / result.ms:.2f}x)" if result.ms else ""))
    return "| " + " | ".join([*cells, _cell(result.error, "{:.1e}")]) + " |"


def _missing(results: list[Result]) -> list[str]:
    """Each reason once, with the cases that it concerns."""
    cases = len({result.case.name for result in results})
    by_reason: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.ms is None:
            by_reason.setdefault((result.contender or "everyone", result.reason), []).append(result.case.name)
    return [
        f"- {contender}: {reason}. {'All cases.' if len(names) == cases else ', '.join(names)}"
        for (contender, reason), names in by_reason.items()
    ]


def report(results: list[Result], copy: float, where: dict[str, str]) -> str:
    """In markdown. Peers' columns: ms, and how many times ours."""
    lines = [
        ", ".join(f"{key} {value}" for key, value in where.items()) + ".",
        "",
        f"Copy: {copy / 1e12:.2f} TB/s, read and written, of a bf16 array of 4 GB.",
        "",
        "| case | ours | ms | rate | of the floor | of the copy | " + " | ".join(PEERS) + " | error |",
        "|" + "---|" * (7 + len(PEERS)),
    ]
    cases: dict[str, dict[str, Result]] = {}
    for result in results:
        cases.setdefault(result.case.name, {})[result.contender] = result
    for of_case in cases.values():
        lines += [_row(r, of_case, copy) for name, r in of_case.items() if name and name not in PEERS]
    lines += ["", _NOTES]
    if missing := _missing(results):
        lines += ["", "Not timed:", "", *missing]
    lines += ["", "| aim | asked | measured | |", "|---|---|---|---|"]
    for aim in aims(results, copy):
        asked = f"{'at least' if aim.at_least else 'at most'} {aim.limit:g}{aim.unit}"
        lines.append(f"| {aim.name} | {asked} | {_cell(aim.measured, '{:.4g}' + aim.unit)} | {aim.verdict} |")
    return "\n".join(lines)


def to_row(result: Result) -> dict[str, Any]:
    """A result for JSON."""
    error = None if result.error is None or not math.isfinite(result.error) else result.error
    return {
        "case": result.case.name,
        "contender": result.contender,
        "ms": result.ms,
        "flops": result.case.flops,
        "bytes": result.case.bytes,
        "of_floor": result.of_floor,
        "error": error,
        "failed": result.failed,
        "rounds": result.rounds,
        "passes": result.passes,
        "reason": result.reason,
    }


def to_json(results: list[Result], copy: float, where: dict[str, str]) -> str:
    rows = [to_row(r) for r in results]
    verdicts = [
        {"aim": a.name, "limit": a.limit, "at_least": a.at_least, "measured": a.measured, "verdict": a.verdict}
        for a in aims(results, copy)
    ]
    return json.dumps(
        {"environment": where, "copy_bytes_per_second": copy, "results": rows, "aims": verdicts}, indent=1
    )


def environment() -> dict[str, str]:
    """Device, driver and versions; what can't be found out is left out."""
    device = jax.devices()[0]
    found = {
        "device": device.device_kind,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
    }
    found |= {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": device.client.platform_version.replace("\n", " "),
    }
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split(
            "\n"
        )[0]
    except (OSError, subprocess.SubprocessError):
        pass
    return found
