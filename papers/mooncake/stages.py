"""Costs of Mooncake's two stages and of storing a prompt's KV cache, and the share of it that is used again.

Figures 2 and 5, table 1 and section 8, LLaMA2-70B on a host of 8 A800. None needs a cluster.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from longctx.models import cache_bytes
from longctx.serving.predictor import Work
from longctx.simulation.utilization import mbu, mfu, model_flops
from longctx.simulation.workloads import WorkloadRequest, read_workload
from papers.figures.figure import Figure, Inputs, Statement, based_on, ordering
from papers.mooncake.cluster import CHUNK, MODEL, PLAN, TENSOR, TOPOLOGY, host_bandwidth, predict
from papers.mooncake.workloads import (
    DATASETS,
    PAPER_RATE,
    SYNTHETIC,
    conversation,
    dataset,
    reuse,
    token_rate,
)

Row = dict[str, Any]
LENGTHS = [2**n for n in range(9, 18)]  # tokens of a prompt: 512 to 128K
BATCHES = [2**n for n in range(8)]  # decodes in a step: 1 to 128
CONTEXT = 7_955  # tokens of each decode's context: the mean prompt of table 1's real data
LAYERS = MODEL.num_layers


def figure_2(inputs: Inputs) -> Figure:
    """Throughput and latency of prefill by length, and of decode by batch size."""
    device, peak = predict(), TOPOLOGY.device.flops["bfloat16"] * TENSOR
    prefill = [device.prefill_seconds(0, tokens, CHUNK) for tokens in LENGTHS]
    decode = [device.seconds(Work(batch, batch, batch * CONTEXT)) for batch in BATCHES]
    rates = [tokens / seconds for tokens, seconds in zip(LENGTHS, prefill, strict=True)]
    outputs = [batch / seconds for batch, seconds in zip(BATCHES, decode, strict=True)]
    table: list[Row] = [
        {"stage": "prefill", "tokens or batch": n, "seconds": s, "tokens/s": r, "normalised": r / max(rates)}
        for n, s, r in zip(LENGTHS, prefill, rates, strict=True)
    ] + [
        {"stage": "decode", "tokens or batch": n, "seconds": s, "tokens/s": r, "normalised": r / max(outputs)}
        for n, s, r in zip(BATCHES, decode, outputs, strict=True)
    ]
    best = int(np.argmax(rates))
    computed = model_flops(MODEL, Work.of([(0, LENGTHS[best], True)])) / prefill[best] / peak
    uses = [_shares(batch, seconds) for batch, seconds in zip(BATCHES, decode, strict=True)]
    growth = prefill[-1] / prefill[LENGTHS.index(8192)]
    statements = [
        ordering("2", f"prefill: seconds grow faster than length: 16 times 8,192 tokens take {growth:.0f} times as "
                 "long, and each doubling from there on more than doubles them",
                 all(b > 2 * a for a, b in pairwise(prefill[LENGTHS.index(8192) :])) and growth > 16),
        ordering("2", f"prefill is computationally intensive except for short prompts: its throughput is highest at "
                 f"{LENGTHS[best]:,} tokens ({computed:.0%} of the peak), lower at 512 and at 128K",
                 computed > 0.4 and 0 < best < len(LENGTHS) - 1),
        ordering("2", f"decode: seconds grow slower than the batch: 128 times the batch takes "
                 f"{decode[-1] / decode[0]:.1f} times as long, and each doubling less than doubles them",
                 all(b < 2 * a for a, b in pairwise(decode))),
        ordering("2", f"decode is bound by memory: a batch of 1 reaches {uses[0][0]:.0%} of the bandwidth and "
                 f"{uses[0][1]:.1%} of the FLOP/s, one of 128 {uses[-1][0]:.0%} and {uses[-1][1]:.0%}",
                 all(read > 3 * computed for read, computed in uses)),
    ]  # fmt: skip

    def draw(left: Any, right: Any) -> None:
        for axes, sizes, seconds, found, name in (
            (left, LENGTHS, prefill, rates, "tokens of a prompt"), (right, BATCHES, decode, outputs, "batch size")
        ):  # fmt: skip
            axes.plot(sizes, np.array(found) / max(found), "o-", label="throughput")
            axes.plot(sizes, np.array(seconds) / max(seconds), "s-", label="latency")
            axes.set(xscale="log", xlabel=name, ylabel="of the most")
            axes.legend()

    title = f"Prefill by length and decode by batch ({CONTEXT:,} tokens each): LLaMA2-70B on 8 A800"
    return Figure(title, statements, table, draw, panels=2)


def _shares(batch: int, seconds: float) -> tuple[float, float]:
    """Shares of the data sheet's memory bandwidth and FLOP/s that a step of decodes reaches."""
    work, device = Work(batch, batch, batch * CONTEXT), TOPOLOGY.device
    return mbu(MODEL, work, device, PLAN, seconds), mfu(MODEL, work, device, TENSOR, seconds)


def prefill_ends(tokens: int, cached: int = 0) -> np.ndarray:
    """Predict when each layer of each chunk of a prompt is computed, `[chunks, layers]` seconds."""
    device, found, now = predict(), [], 0.0
    for start in range(cached, tokens, CHUNK):
        seconds = device.prefill_seconds(start, min(start + CHUNK, tokens), CHUNK)
        found.append(now + seconds * np.arange(1, LAYERS + 1) / LAYERS)
        now += seconds
    return np.array(found)


def storing(tokens: int) -> tuple[float, float]:
    """Seconds by which storing a prompt's KV cache delays it: all at the end, and layer by layer (4.2)."""
    per_token = cache_bytes(MODEL, 1) / host_bandwidth()
    ends, stored = prefill_ends(tokens), 0.0
    for at, layers in enumerate(ends):
        rows = min(CHUNK, tokens - at * CHUNK)
        for end in layers.tolist():
            stored = max(stored, end) + rows * per_token / LAYERS
    return tokens * per_token, stored - float(ends[-1, -1])


def loading(tokens: int, share: float) -> tuple[float, float, float]:
    """A prompt of which a share is loaded layer by layer: seconds of the whole, of loading, of computing the rest."""
    cached = int(tokens * share) // 512 * 512
    load = cached * cache_bytes(MODEL, 1) / host_bandwidth()
    first, *rest = np.diff(prefill_ends(tokens, cached).ravel(), prepend=0.0).reshape(-1, LAYERS)
    now = 0.0
    for layer, seconds in enumerate(first.tolist()):
        now = max(now, load * (layer + 1) / LAYERS) + seconds
    computed = float(first.sum() + sum(chunk.sum() for chunk in rest))
    return now + computed - float(first.sum()), load, computed


def figure_5(inputs: Inputs) -> Figure:
    """Storing a prompt's KV cache layer by layer against storing it at the end."""
    lengths = [tokens for tokens in LENGTHS if tokens >= 8192]
    found = {tokens: storing(tokens) for tokens in lengths}
    shares = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99)
    loads = {(tokens, share): loading(tokens, share) for tokens in (8192, 131072) for share in shares}
    table: list[Row] = [
        {"tokens": n, "at the end, s": a, "layer by layer, s": b, "prefill, s": float(prefill_ends(n)[-1, -1])}
        for n, (a, b) in found.items()
    ] + [
        {"tokens": n, "cached share": share, "loading, s": load, "prefill, s": rest, "both, s": whole}
        for (n, share), (whole, load, rest) in loads.items()
    ]
    at_end, by_layer = found[lengths[-1]]
    worst = max(whole / max(load, rest) for whole, load, rest in loads.values())
    gbps = host_bandwidth() / 1e9
    statements = [
        ordering("5", f"storing at {gbps:.0f} GB/s: layer by layer delays a prompt less than at the end, at all lengths"
                 " from 8K to 128K", all(b < a for a, b in found.values())),
        ordering("5", "the longer the prompt, the more seconds storing layer by layer saves",
                 all(x[0] - x[1] < y[0] - y[1] for x, y in pairwise(found.values()))),
        ordering("5", f"at 128K layer by layer hides nearly all: {1e3 * by_layer:.1f} ms are left of "
                 f"{1e3 * at_end:.0f} ms (less than a twentieth)", by_layer < at_end / 20),
        ordering("4.2", "loading a cached prefix layer by layer, a prefill takes about as long as the longer of loading"
                 f" and computing: at most {worst:.2f} times, from 0 to 99 % cached, 8K and 128K", worst < 1.25),
    ]  # fmt: skip

    def draw(axes: Any) -> None:
        axes.plot(lengths, [1e3 * a for a, _ in found.values()], "o-", label="stored at the end")
        axes.plot(lengths, [1e3 * b for _, b in found.values()], "s-", label="stored layer by layer")
        axes.set(xscale="log", yscale="log", xlabel="tokens of a prompt", ylabel="latency of storing, ms")
        axes.legend()

    title = "Storing the KV cache of a prompt: LLaMA2-70B on 8 A800, 800 Gb/s"
    return Figure(title, statements, table, draw)


def _traces(inputs: Inputs) -> dict[str, list[WorkloadRequest]]:
    """Workloads by name; the synthetic trace where its file is there."""
    count = 200 if inputs.quick else 3_000
    found = {"conversation trace": conversation(inputs)}
    file = inputs.file(SYNTHETIC)
    if file is not None:
        found["synthetic trace"] = read_workload(file, count if inputs.quick else None)
    return found | {name: dataset(name, count, inputs.seed) for name in DATASETS}


def _means(requests: list[WorkloadRequest]) -> tuple[float, float]:
    prompts, outputs = zip(*((x.prompt_tokens, x.output_tokens) for x in requests), strict=True)
    return float(np.mean(prompts)), float(np.mean(outputs))


def table_1(inputs: Inputs) -> Figure:
    """The data sets as they are made here, beside the paper's means."""
    table, off = list[Row](), list[float]()
    for name, requests in _traces(inputs).items():
        (prompt, output), [cached] = _means(requests), reuse(requests)
        row = {"data set": name, "requests": len(requests), "mean prompt": prompt, "mean output": output}
        table.append({**row, "reuse": cached, "longest prompt": max(x.prompt_tokens for x in requests)})
        about = DATASETS.get(name)
        if about is not None:
            off += [abs(prompt / about.prompt - 1), abs(output / about.output - 1), abs(cached - about.reuse)]
    trace = conversation(inputs)
    prompt, output = _means(trace)
    why = "the public conversation trace is another one: longer requests, 12,031 in an hour for the paper's 23,000"
    numbers = [
        Statement("table 1", "real data: mean prompt of the public conversation trace", 7_955, prompt, "tokens", why),
        Statement("table 1", "real data: mean answer of the public conversation trace", 194, output, "tokens", why),
        Statement("table 1", "real data: prompt tokens a second, if the paper's 23,000 requests came in an hour too",
                  PAPER_RATE, token_rate(trace), "tokens/s"),
    ]  # fmt: skip
    statements = [
        *based_on("arithmetic", numbers),
        ordering("table 1", "our data sets have the table's mean lengths and cache ratios within 4 %", max(off) < 0.04),
    ]
    return Figure("Data sets of the end-to-end experiments", statements, table)


def section_8(inputs: Inputs) -> Figure:
    """Share of the prompts that can be used again, with room for everything."""
    traces = {name: x for name, x in _traces(inputs).items() if "k" not in name.split("-")[-1]}
    found = {name: reuse(requests)[0] for name, requests in traces.items()}
    parts = 6
    by_time = reuse(conversation(inputs), parts)
    ours = 100 * found["conversation trace"]
    why = (
        f"the trace is an hour from an empty cache: {100 * by_time[0]:.0f} % in its first 10 minutes, "
        f"{100 * by_time[-1]:.0f} % in its last"
    )
    table: list[Row] = [{"workload": name, "reused share": share} for name, share in found.items()]
    table += [{"workload": f"conversation trace, part {at + 1} of {parts}", "reused share": share}
              for at, share in enumerate(by_time)]  # fmt: skip
    statements = [
        Statement("8", "conversation trace, cache without limit: tokens used again", 50, ours, "%", why),
        ordering("8", "no workload can use more than 90 % again; conversations at most 50 %, documents that several "
                 f"questions are asked about more ({found['l-eval']:.0%}, 6 a document)",
                 max(found.values()) <= 0.9 and ours <= 50 and found["l-eval"] > 0.5),
    ]  # fmt: skip

    def draw(axes: Any) -> None:
        axes.bar(range(1, parts + 1), [100 * share for share in by_time])
        axes.set(xlabel="sixth of the conversation trace", ylabel="tokens used again, %")

    title = "How much of the KV cache can be used again, with room for everything"
    return Figure(title, statements, table, draw)
