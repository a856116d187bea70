"""Compiled programs of `to_nnx`: what moves between ranks, what is stored, and what doesn't grow with the layers."""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from hlo import collectives

from longctx.models import Llama, LlamaConfig
from longctx.nnx import to_nnx
from longctx.parallel import make_mesh

pytestmark = pytest.mark.usefixtures("users_fusions")
RANKS, LENGTH, VOCAB = 4, 512, 1000
CONFIG = LlamaConfig(VOCAB, 16, 640, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=4096)
OWN = LENGTH // RANKS


@functools.cache
def lowered(gradient: bool, layers: int = 2, length: int = LENGTH, **options: Any) -> Any:
    config = dataclasses.replace(CONFIG, num_layers=layers)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), Llama(config).abstract_params())
    module = to_nnx(Llama(config), params, make_mesh(context=RANKS), **options)
    graph, state = nnx.split(module)
    tokens = np.zeros((1, length), np.int32)

    def total(state: Any, tokens: Any) -> Any:
        return nnx.merge(graph, state).loss(tokens)[0]

    return jax.jit(jax.grad(total) if gradient else total).lower(state, tokens)


@functools.cache
def compiled(gradient: bool, **options: Any) -> Any:
    return lowered(gradient, **options).compile()


def sent_in_layers(gradient: bool, **options: Any) -> dict[str, list[float]]:
    """Bytes of the collectives inside loops over layers, by opcode."""
    sent: dict[str, list[float]] = {}
    for collective in collectives(compiled(gradient, **options).as_text(), RANKS):
        if collective.within:
            sent.setdefault(collective.opcode, []).append(collective.sent)
    return sent


def test_a_layer_sends_keys_and_values_round_the_ring_and_no_token_is_reordered() -> None:
    keys_and_values = OWN * 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    assert sent_in_layers(False, chunk_size=32) == {"collective-permute": [keys_and_values] * (RANKS - 1)}
    # Before the layers integers move: each token's are arranged, and gathered. After them, losses are summed.
    outside = [c for c in collectives(compiled(False, chunk_size=32).as_text(), RANKS) if not c.within]
    assert {c.opcode for c in outside} == {"collective-permute", "all-gather", "all-reduce"}
    assert sum(c.sent for c in outside) <= 16 * LENGTH


@pytest.mark.slow
def test_remat_does_not_run_the_ring_forward_again() -> None:
    plain = sorted(sent_in_layers(True, chunk_size=32)["collective-permute"])
    # Keys and values once forward and once backward; sums of dK and of dV follow one hop behind, and go home.
    assert len(plain) == (1 + 1 + 2) * (RANKS - 1)
    assert sorted(sent_in_layers(True, remat=True, chunk_size=32)["collective-permute"]) == plain


@pytest.mark.slow
def test_thirty_layers_are_one_program_as_two_are() -> None:
    def program(layers: int) -> str:
        """The text without the number of layers."""
        text = lowered(True, layers=layers, remat=True, chunk_size=32).as_text()
        return re.sub(rf"\b{layers}x|dense<{layers}>|\b{layers}\b", "L", text)

    assert len(program(30).splitlines()) == len(program(3).splitlines())


@pytest.mark.slow
def test_logits_and_feed_forward_are_stored_for_a_chunk_alone() -> None:
    chunked = compiled(True, remat=True, chunk_size=32).as_text()
    whole = compiled(True).as_text()
    shapes = lambda text, *sizes: any(f"f32[{size}]" in text for size in sizes)  # noqa: E731
    for last in (VOCAB, CONFIG.intermediate_size):
        sizes = (f"{OWN},{last}", f"1,{OWN},{last}", f"2,1,{OWN},{last}", f"4,32,{last}", f"{LENGTH},{last}")
        assert shapes(whole, *sizes)
        assert not shapes(chunked, *sizes)
        assert shapes(chunked, f"32,{last}")


@pytest.mark.slow
def test_memory_of_a_gradient_is_linear_in_the_tokens_of_a_rank() -> None:
    small, medium, large = (
        compiled(True, length=scale * LENGTH, remat=True, chunk_size=32).memory_analysis().temp_size_in_bytes
        for scale in (2, 4, 8)
    )
    # What doesn't grow is the parameters' gradients; what does, does so by the same for each token.
    assert large - medium < 2.2 * (medium - small)
