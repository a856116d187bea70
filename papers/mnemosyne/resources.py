"""Mnemosyne's arithmetic of resources: sections 2.1, 3.1 and 4.1, and figure 5, which is Medha's figure 2."""

import math
from collections.abc import Callable
from typing import Any

from longctx.models import cache_bytes, weight_bytes
from longctx.simulation import Totals
from longctx.simulation.utilization import model_flops
from papers.figures.figure import Figure, Inputs, Statement, based_on, ordering
from papers.mnemosyne.runs import B8, B70, DEVICE, M, Row, lines, named

MI = 2**20  # the papers' "1M" where their numbers need it
TTFT, TPOT = 30.0, 0.02  # seconds; Mnemosyne, figure 5
PEAK, MEMORY = DEVICE.flops["bfloat16"], DEVICE.memory_bytes or math.nan


def attention_flops(tokens: float, causal: bool) -> float:
    """FLOPs of a prompt for Llama-3 8B: equation 1 over all layers, or the half that the causal mask leaves."""
    return 4 * tokens**2 * B8.head_dim * B8.num_heads * B8.num_layers / (1 + causal)


def prompt_flops(tokens: float, causal: bool) -> float:
    """Attention and linear layers of a prompt."""
    return attention_flops(tokens, causal) + model_flops(B8, Totals(rows=round(tokens)))


def longest(is_met: Callable[[int], bool]) -> int:
    """The longest prompt, in tokens, that meets a condition which longer ones don't."""
    low, high = 0, 2**30
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def section_2_1(inputs: Inputs) -> Figure:
    """Keys and values, products, and the chunk that saturates an H100, for Llama-3 70B."""
    cache = cache_bytes(B70, MI) / 2**30
    equation = 4 * M**2 * B70.head_dim * B70.num_heads * B70.num_layers / 1e18
    causal = model_flops(B70, Totals(rows=M, pairs=M * (M + 1) // 2)) / 1e18
    ridge = PEAK / DEVICE.memory_bandwidth
    chunk = ridge / (B70.num_heads / B70.num_kv_heads)  # equation 7
    why = f"equation 1 over 80 layers; with the causal mask, and linear layers, it is {causal:.2f}"
    statements = [
        Statement("2.1", "70B, 1M (2^20) tokens: keys and values", 320, cache, "GiB"),
        Statement("2.1", "70B, 1M tokens: products of attention by equation 1", 2.4, equation, "EFLOP", why),
        Statement("4.1", "70B: tokens of a chunk that saturate an H100 (equation 7)", 40, chunk, "tokens"),
    ]
    table: list[Row] = [
        {"quantity": "keys and values of 2^20 tokens, GiB", "paper": 320, "ours": cache},
        {"quantity": "equation 1 at 1M tokens, EFLOP", "paper": 2.4, "ours": equation},
        {"quantity": "causal attention and linear layers at 1M tokens, EFLOP", "paper": None, "ours": causal},
        {"quantity": "FLOP/byte at which products take as long as reading", "paper": None, "ours": ridge},
        {"quantity": "tokens of a chunk that reach it", "paper": 40, "ours": chunk},
    ]
    title = "What a million tokens of Llama-3 70B take"
    return Figure(title, based_on("arithmetic", statements), table)


def figure_5(inputs: Inputs) -> Figure:
    """Limits of 8 H100, and GPUs that a context needs, by data sheet: 8B, TTFT 30 s, TPOT 20 ms."""
    weights, per_token, bandwidth = weight_bytes(B8), cache_bytes(B8, 1), DEVICE.memory_bandwidth
    limits = {
        "compute, equation 1": longest(lambda n: prompt_flops(n, False) <= 8 * PEAK * TTFT),
        "compute, causal": longest(lambda n: prompt_flops(n, True) <= 8 * PEAK * TTFT),
        "bandwidth": longest(lambda n: weights + n * per_token <= 8 * bandwidth * TPOT),
        "capacity": longest(lambda n: weights + n * per_token <= 8 * MEMORY),
    }
    table: list[Row] = [{"resource": name, "tokens_on_8": limit} for name, limit in limits.items()]
    for tokens in (MI // 2, M, MI, 2 * M, 2 * MI, 4 * MI, 8 * MI):
        needs = {
            "compute, equation 1": prompt_flops(tokens, False) / (PEAK * TTFT),
            "compute, causal": prompt_flops(tokens, True) / (PEAK * TTFT),
            "causal attention alone": attention_flops(tokens, True) / (PEAK * TTFT),
            "bandwidth": (weights + tokens * per_token) / (bandwidth * TPOT),
            "capacity": (weights + tokens * per_token) / MEMORY,
        }
        table += [{"resource": name, "tokens": tokens, "gpus": gpus} for name, gpus in needs.items()]
    gpus = {(row["resource"], row["tokens"]): row["gpus"] for row in table if "gpus" in row}
    dense, causal, alone = "compute, equation 1", "compute, causal", "causal attention alone"
    by_compute, by_causal = limits[dense] / 1024, limits[causal] / MI
    why = f"equation 1, which the paper's 20 and 80 GPUs need; with the causal mask {limits[causal] / 1024:.0f}"
    statements = [
        Statement("5a", "8B, 8 H100: longest prompt within 30 s by compute", 768, by_compute, "Ki tokens", why),
        Statement("5b", "8B, GPUs for 1M (2^20) tokens within 30 s, no causal mask", 20, gpus[dense, MI], "GPUs"),
        Statement("5b", "8B, GPUs for 2M (2^21) tokens, no causal mask", 80, gpus[dense, 2 * MI], "GPUs"),
        Statement("Medha 2a", "8B, 8 H100: longest prompt by compute, causal", 1.0, by_causal, "Mi tokens"),
        Statement("Medha 2a", "8B, 8 H100: longest context in memory", 4.0, limits["capacity"] / MI, "Mi tokens"),
        Statement("Medha 2b", "8B, GPUs for 1M (2^20) tokens, causal", 10, gpus[causal, MI], "GPUs"),
        Statement("Medha 2b", "8B, GPUs for 2M (2^21) tokens, causal", 40, gpus[causal, 2 * MI], "GPUs"),
        Statement("Medha 2b", "8B, GPUs for 10^6 tokens, causal attention alone", 10, gpus[alone, M], "GPUs"),
        Statement("Medha 2b", "8B, GPUs for 2 x 10^6 tokens, causal attention alone", 40, gpus[alone, 2 * M], "GPUs"),
        ordering(
            "5a",
            "compute limits the context most, memory capacity least",
            max(limits[dense], limits[causal]) < limits["bandwidth"] < limits["capacity"],
        ),
    ]

    def draw(left: Any, right: Any) -> None:
        left.barh(list(limits), [limit / MI for limit in limits.values()])
        left.set_xlabel("longest context on 8 H100, Mi tokens")
        lines(right, [row for row in table if "gpus" in row], "tokens", "gpus", by="resource")
        right.set(xscale="log", yscale="log", xlabel="tokens, M", ylabel="H100 needed")
        named(right, (0.5, 1, 2, 4, 8), unit=M)

    title = "Which resource limits the context: Llama-3 8B, TTFT 30 s, TPOT 20 ms"
    statements = based_on("arithmetic", statements)
    return Figure(title, statements, table, draw, panels=2)
