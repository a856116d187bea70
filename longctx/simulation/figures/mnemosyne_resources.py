"""Mnemosyne's arithmetic of resources: sections 2.1, 3.1 and 4.1, and figure 5, which is Medha's figure 2."""

import math
from collections.abc import Callable
from typing import Any

from longctx.models.footprint import cache_bytes, weight_bytes
from longctx.simulation.figures.figure import Figure, Inputs, Statement, ordering
from longctx.simulation.figures.mnemosyne_runs import B8, B70, TOPOLOGY, TPOT_TARGET
from longctx.simulation.utilization import Totals, model_flops

MI = 2**20  # the papers' "1M" where their numbers need it
TTFT = 30.0  # seconds; Mnemosyne, figure 5
TPOT = 0.02
DEVICE = TOPOLOGY.device
PEAK = DEVICE.flops["bfloat16"]


def attention_flops(tokens: float, causal: bool) -> float:
    """Of a prompt for Llama-3 8B: equation 1 over all layers, or the half that the causal mask leaves of it."""
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
    equation = 4 * 1e12 * B70.head_dim * B70.num_heads * B70.num_layers
    causal = model_flops(B70, Totals(rows=1_000_000, pairs=500_000_500_000))
    ridge = PEAK / DEVICE.memory_bandwidth  # FLOP/byte
    chunk = ridge / (B70.num_heads / B70.num_kv_heads)  # equation 7
    statements = [
        Statement("2.1", "70B, 1M (2^20) tokens: keys and values", 320, cache, "GiB"),
        Statement("2.1", "70B, 1M tokens: products of attention by equation 1, no causal mask", 2.4, equation / 1e18,
                  "EFLOP", "equation 1 times 80 layers is 2.62; with the mask, and linear layers, it is "
                  f"{causal / 1e18:.2f}"),
        Statement("4.1", "70B: tokens of a chunk that saturate an H100 (equation 7)", 40, chunk, "tokens"),
    ]  # fmt: skip
    table = [
        {"quantity": "KV cache of 2^20 tokens, GiB", "paper": 320, "ours": cache},
        {"quantity": "equation 1 at 1M tokens, EFLOP", "paper": 2.4, "ours": equation / 1e18},
        {"quantity": "causal attention and linear layers at 1M tokens, EFLOP", "paper": None, "ours": causal / 1e18},
        {"quantity": "FLOP/byte at which products take as long as reading", "paper": None, "ours": ridge},
        {"quantity": "tokens of a chunk that reach it", "paper": 40, "ours": chunk},
    ]
    title = "What a million tokens of Llama-3 70B take"
    return Figure("mnemosyne_section_2_1", title, "mnemosyne", statements, table)


def figure_5(inputs: Inputs) -> Figure:
    """Limits of 8 H100, and GPUs that a context needs, by data sheet: 8B, TTFT 30 s, TPOT 20 ms."""
    weights, per_token = weight_bytes(B8), cache_bytes(B8, 1)
    memory, bandwidth = 8 * (DEVICE.memory_bytes or math.nan), 8 * DEVICE.memory_bandwidth
    limits = {
        "compute, equation 1": longest(lambda n: prompt_flops(n, False) <= 8 * PEAK * TTFT),
        "compute, causal": longest(lambda n: prompt_flops(n, True) <= 8 * PEAK * TTFT),
        "bandwidth": longest(lambda n: weights + n * per_token <= bandwidth * TPOT),
        "capacity": longest(lambda n: weights + n * per_token <= memory),
    }
    needs: list[dict[str, Any]] = []
    for millions in (0.5, 1, 2, 4, 8):
        tokens = millions * MI
        needs.append({
            "tokens (2^20)": millions,
            "compute, equation 1": prompt_flops(tokens, False) / (PEAK * TTFT),
            "compute, causal": prompt_flops(tokens, True) / (PEAK * TTFT),
            "causal attention alone": attention_flops(tokens, True) / (PEAK * TTFT),
            "bandwidth": (weights + tokens * per_token) / (DEVICE.memory_bandwidth * TPOT),
            "capacity": (weights + tokens * per_token) / (DEVICE.memory_bytes or math.nan),
        })  # fmt: skip
    one, two = (next(row for row in needs if row["tokens (2^20)"] == millions) for millions in (1, 2))
    dense, causal = "compute, equation 1", "compute, causal"
    statements = [
        Statement("5a", "8B, 8 H100: longest prompt within 30 s by compute, no causal mask", 768,
                  limits[dense] / 1024, "Ki tokens",
                  "the paper's 20 and 80 GPUs need equation 1, as here; with the causal mask it would be "
                  f"{limits[causal] / 1024:.0f}"),
        Statement("5b", "GPUs for 1M (2^20) tokens, no causal mask", 20, math.ceil(one[dense]), "GPUs"),
        Statement("5b", "GPUs for 2M tokens, no causal mask", 80, math.ceil(two[dense]), "GPUs"),
        Statement("Medha 2a", "8B, 8 H100: longest prompt within 30 s by compute, causal", 1.0, limits[causal] / MI,
                  "Mi tokens"),
        Statement("Medha 2a", "8B, 8 H100: longest context that memory holds", 4.0, limits["capacity"] / MI,
                  "Mi tokens"),
        Statement("Medha 2b", "GPUs for 1M tokens, causal", 10, one[causal], "GPUs"),
        Statement("Medha 2b", "GPUs for 2M tokens, causal", 40, two[causal], "GPUs"),
        Statement("Medha 2b", "GPUs for 1M (10^6) tokens, causal attention alone", 10,
                  attention_flops(1e6, True) / (PEAK * TTFT), "GPUs"),
        Statement("Medha 2b", "GPUs for 2M (2 x 10^6) tokens, causal attention alone", 40,
                  attention_flops(2e6, True) / (PEAK * TTFT), "GPUs"),
        ordering("5a", "compute limits the context most, memory capacity least",
                 max(limits[dense], limits[causal]) < limits["bandwidth"] < limits["capacity"]),
    ]  # fmt: skip
    table = [{"resource": name, "tokens on 8 H100": limit} for name, limit in limits.items()]

    def draw(left: Any, right: Any) -> None:
        left.barh(list(limits), [limit / MI for limit in limits.values()])
        left.set_xlabel("longest context on 8 H100, Mi tokens")
        for name in list(needs[0])[1:]:
            right.plot([row["tokens (2^20)"] for row in needs], [row[name] for row in needs], "o-", label=name)
        right.set(xscale="log", yscale="log", xlabel="tokens, Mi", ylabel="H100 needed")
        right.legend()

    title = "Which resource limits the context: Llama-3 8B, TTFT 30 s, TPOT 20 ms"
    return Figure("mnemosyne_figure_5", title, "mnemosyne", statements, [*table, *needs], draw, panels=2)
