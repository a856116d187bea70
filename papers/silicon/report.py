"""The page of measured runs: a table of errors, and predicted against measured times, one point a run."""

from collections.abc import Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from longctx import plotting
from papers.silicon.engines import CAPTURED, ENGINES, FRONT_END
from papers.silicon.runs import Run

Predictions = Mapping[str, tuple[float, float]]


class Errors(NamedTuple):
    """Errors of one time over some runs.

    Attributes:
      mean, median: of |predicted / measured - 1|.
      rank: Spearman's correlation of predicted and measured; NaN for fewer than three runs, or equal ones.
    """

    mean: float
    median: float
    rank: float

    @classmethod
    def of(cls, predicted: List[float], measured: List[float]) -> "Errors":
        """Errors of predictions, in the order of what was measured."""
        ours, theirs = np.array(predicted), np.array(measured)
        errors = np.abs(ours / theirs - 1)
        has_ranks = len(ours) > 2 and np.ptp(ours) > 0 and np.ptp(theirs) > 0
        rank = stats.spearmanr(ours, theirs).statistic if has_ranks else np.nan
        return cls(float(errors.mean()), float(np.median(errors)), float(rank))

    def __str__(self) -> str:
        rank = "-" if np.isnan(self.rank) else f"{self.rank:.2f}"
        return f"{100 * self.mean:.1f} / {100 * self.median:.1f} % | {rank}"


def write_page(runs: List[Run], ours: Predictions, peer: Predictions, out: Path) -> str:
    """Write `silicon.md` and `silicon.svg`.

    Args:
      runs: measured.
      ours, peer: (TTFT, TPOT) in seconds by the name of a run; runs may lack.
      out: folder to write into.

    Returns:
      The text of the page.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(f"{run.engine}, {run.model.split('/')[-1]}{', FP8' if run.fp8_weights else ''}", []).append(
            run
        )
    known = sum(run.name in ours for run in runs)
    lines = [_HEAD.format(count=len(runs), known=known, front_end=1e3 * FRONT_END, captured=CAPTURED)]
    lines += [_overheads()]
    lines += ["## Errors\n", _table(groups, ours, peer)]
    lines += [_ranks(runs, {"longctx": ours, "AIConfigurator": peer})] if peer else []
    if plotting.can_draw():
        _draw(groups, ours, out / "silicon.svg")
        lines += ["![Predicted against measured TPOT and TTFT, one point a run](silicon.svg)\n"]
    text = "\n".join(lines)
    (out / "silicon.md").write_text(text, encoding="utf-8")
    return text


def _overheads() -> str:
    rows = [
        "| engine | scheduler | a step | a sequence | first token | a layer of prompts |",
        "|---|---|---|---|---|---|",
    ]
    for name, engine in ENGINES.items():
        step, first, layer, sequence = (1e3 * seconds for seconds in engine.overheads)
        own = f"{step:.2f} ms | {1e3 * sequence:.0f} us | {first:.0f} ms | {layer:.2f} ms"
        rows.append(f"| {name} | `{engine.baseline}` | {own} |")
    return "\n".join(rows) + "\n"


def _table(groups: Mapping[str, List[Run]], ours: Predictions, peer: Predictions) -> str:
    rows = [
        "| runs | of | n | TPOT, mean / median | rank | TTFT, mean / median | rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, group in groups.items():
        halves = {
            "longctx, fitted half": ([run for run in group if run.is_fitted], ours),
            "longctx, other half": ([run for run in group if not run.is_fitted], ours),
            "longctx, rows of the peer": ([run for run in group if run.name in peer], ours),
            "AIConfigurator": ([run for run in group if run.name in ours], peer),
        }
        for which, (members, predictions) in halves.items():
            known = [run for run in members if run.name in predictions]
            if known:
                ttft, tpot = zip(*(predictions[run.name] for run in known), strict=True)
                errors = Errors.of(tpot, [run.tpot for run in known]), Errors.of(ttft, [run.ttft for run in known])
                rows.append(f"| {name} | {which} | {len(known)} | {errors[0]} | {errors[1]} |")
    return "\n".join(rows) + "\n"


def _ranks(runs: List[Run], predictions: Mapping[str, Predictions]) -> str:
    """The text on how predictions rank GPUs and users of an engine, for prompts and outputs of one length."""
    workloads: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        if all(run.name in each for each in predictions.values()):
            key = run.engine, run.model, run.fp8_weights, run.prompt_tokens, run.output_tokens
            workloads.setdefault(key, []).append(run)
    many = [group for group in workloads.values() if len(group) >= 5]
    said = []
    for name, known in predictions.items():
        ranks = [
            [
                Errors.of(
                    [known[run.name][index] for run in group], [(run.ttft, run.tpot)[index] for run in group]
                ).rank
                for group in many
            ]
            for index in (1, 0)
        ]
        means = [f"{np.mean(each):.2f} (median {np.median(each):.2f})" if each else "-" for each in ranks]
        said.append(f"{name} {means[0]} of TPOT, {means[1]} of TTFT")
    return f"Rank over the plans of one workload, mean of {len(many)} with at least five: {'; '.join(said)}.\n"


def _draw(groups: Mapping[str, List[Run]], ours: Predictions, path: Path) -> None:
    with plotting.style():
        figure, axes = plotting.drawing(2, width=4.6, height=4.2)
        for index, (axis, title) in enumerate(zip(axes, ("TTFT", "TPOT"), strict=True)):
            for number, (name, group) in enumerate(groups.items()):
                known = [run for run in group if run.name in ours]
                measured = [1e3 * (run.ttft, run.tpot)[index] for run in known]
                predicted = [1e3 * ours[run.name][index] for run in known]
                marker, color = plotting.MARKERS[number % 8], plotting.COLORS[number % 8]
                axis.plot(measured, predicted, marker, color=color, markersize=3, alpha=0.7, label=name)
            axis.set(xscale="log", yscale="log", title=f"{title}, ms", xlabel="measured", ylabel="predicted")
            low, high = max(axis.get_xlim()[0], axis.get_ylim()[0]), min(axis.get_xlim()[1], axis.get_ylim()[1])
            axis.plot([low, high], [low, high], color=plotting.PAPER, linewidth=0.8)
        axes[1].legend()
        plotting.save(figure, path)


_HEAD = """# Measured engines

vLLM, SGLang and TensorRT-LLM in simulated time, beside {count} runs of them on H100 that NVIDIA published with
[AIConfigurator](https://github.com/ai-dynamo/aiconfigurator) (Apache-2.0). Of these, {known} were simulated. Times
named longctx are predictions: no engine ran here. `python -m papers.silicon --data DATA`
writes this page.

## Benchmark

A closed loop: each user sends a request when the one before has ended, ten in all. Prompts and outputs have the nominal
lengths. On runs of both halves that meets the measured times better than prompts of 0.8 to 1 of the nominal length,
with which predicted TTFT of vLLM and SGLang is a fifth too short. Measured TTFT hardly depends on the length of
outputs: so outputs are equally long, and users stay in step. TTFT and TPOT are means over requests.

- vLLM and TensorRT-LLM: prompts beside decodes, first come first served. A step has rows for one prompt and a decode of
  each user, as AIConfigurator's estimate has by default (`ctx_tokens`). That is inferred from TTFT: with 8,192 rows a
  step, prompts of 1,024 tokens would wait two to three times as long as was measured.
- SGLang: prompts first, 8,192 tokens a step, and no decodes beside them.
- TensorRT-LLM's runs of Llama have a slot less than there are users, so that one always waits for another's output to
  end. That is inferred from TTFT at 8 to 32 users, which grows with the length of outputs by what an output takes,
  divided by the users.
- All plan a step while the one before runs. Weights and cache are FP8 where the run's are.
- A step of more than {captured} rows is in no CUDA graph: the host starts the kernels of its layers one by one, and the
  step takes at least as long as that. In TensorRT-LLM, on 4 and 8 GPUs, it is more than the GPUs take for a short
  prompt; the other engines' runs show none of it.
- The front end takes {front_end:.0f} ms for each request, one after the other. It is assumed, not fitted.

The overheads of each engine are fitted on one half of the runs, chosen by a checksum of their names (`--fit`): a step,
and each sequence that has a token in it; the first token; and a layer of a step without a CUDA graph, the best of four
on the smaller runs of that half. The scheduling above was chosen by comparison with runs of both halves. The devices
are those of [simulation_hardware.md](../simulation_hardware.md).

AIConfigurator's rows below are its own estimates of the same runs, where `papers.silicon.peer` made them in an
environment that has `aiconfigurator` 0.12. On the 344 Qwen3-32B runs on H100 that it predicts, among which are these,
its mean errors are: TPOT 14.2 % (vLLM), 25.3 % (SGLang), 12.3 % (TensorRT-LLM); TTFT 41.2, 85.2 and 39.6 %.

Not explained: some TTFT of Llama-3.1-8B on TensorRT-LLM from 64 users on, mostly on 4 and 8 GPUs, exceed the prediction
by 0.3 to 1.8 s, where runs beside them don't; a stall of some seconds in the first of ten rounds would look so. The two
runs of vLLM with FP8 weights are several times faster than predicted; unlike those of all other runs, their names do
not say how many users there were.
"""
