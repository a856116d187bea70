"""Fair timing on a shared machine, and what the machine itself can do."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


def measure(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, taking turns after a warm-up, so that a machine whose speed drifts is fair to all."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            time.sleep(0.3)  # idle threads of the one before spin for up to 0.2 s
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def matmul_gflops(rounds: int = 7) -> float:
    """GFLOP/s of one large float32 matrix product."""
    x = jnp.ones((2048, 2048))
    product = jax.jit(jnp.matmul)
    return 2 * 2048**3 / measure({"": lambda: jax.block_until_ready(product(x, x))}, rounds)[""] / 1e9


def read_gbytes(num_floats: int, rounds: int = 7) -> float:
    """GB/s of reading that many float32 once."""
    x = jnp.ones((num_floats // 1024, 1024))
    total = jax.jit(lambda x: jnp.sum(x, 0))
    return 4 * x.size / measure({"": lambda: jax.block_until_ready(total(x))}, rounds)[""] / 1e9
