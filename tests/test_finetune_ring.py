"""`examples/finetune_ring.py` trains alike on eight devices and on one."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from longctx.parallel import make_mesh

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS, LENGTH = 15, 499  # 62.4 tokens a device, so the last five devices have a token of padding


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import finetune_ring

        yield finetune_ring


@pytest.fixture(scope="module")
def model(example: ModuleType) -> tuple[nnx.GraphDef, Any]:
    config = example.Config(hidden_size=32, num_blocks=1, head_dim=8)
    return nnx.split(example.Transformer(config, nnx.Rngs(0)))


@pytest.mark.slow
def test_loss_curve_equals_that_of_one_device(example: ModuleType, model: tuple[nnx.GraphDef, Any]) -> None:
    graph, params = model
    mesh = make_mesh(context=8)
    replicated = example.replicate(params, mesh)
    dense_loss, ring_loss = example.dense_loss(graph), example.ring_loss(graph, mesh)
    batches = [example.make_batch(step, LENGTH) for step in range(STEPS)]
    sharded = [example.shard_batch(batch, mesh) for batch in batches]

    # Loss curves are not enough: Adam takes the same steps if all gradients are multiplied by a number.
    (_, expected), (_, gradient) = dense_loss(params, batches[0]), ring_loss(replicated, sharded[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, expected)

    dense = example.train(dense_loss, params, batches)
    assert dense[-1] < dense[0] - 1.5
    np.testing.assert_allclose(example.train(ring_loss, replicated, sharded), dense, rtol=0, atol=1e-4)

    # The test would notice tokens sharded in zigzag with the positions of contiguous shards.
    misplaced = [
        batch._replace(positions=example.shard_batch(whole, mesh, "contiguous").positions)
        for batch, whole in zip(sharded[:3], batches, strict=False)
    ]
    assert np.abs(example.train(ring_loss, replicated, misplaced) - dense[:3]).max() > 1e-3


def test_batches_are_packed_documents_of_the_standard_library(example: ModuleType) -> None:
    batch = example.make_batch(1, LENGTH)
    tokens, targets, positions, segments = batch
    assert all(x.shape == (LENGTH,) and x.dtype == np.int32 for x in batch)
    assert bytes(tokens[segments == 0].astype(np.uint8)) in Path(example.argparse.__file__).read_bytes()
    ends = np.flatnonzero(targets < 0)
    np.testing.assert_array_equal(segments[ends], [0, 1, 2])
    np.testing.assert_array_equal(positions[ends], np.bincount(segments) - 1)
    np.testing.assert_array_equal(np.delete(targets, ends), tokens[np.setdiff1d(np.arange(LENGTH), ends) + 1])


@pytest.mark.slow
def test_command_line_prints_both_curves(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["finetune_ring.py", "--devices", "8", "--steps", "30", "--length", "4001"])
    example.main()
    title, *curves, last = capsys.readouterr().out.splitlines()
    assert title == "step  ring_pass_kv on 8  dense on 1"
    steps, ring, dense = np.array([line.split() for line in curves], float).T
    np.testing.assert_array_equal(steps, np.arange(30))
    np.testing.assert_allclose(ring, dense, rtol=0, atol=1e-4)
    assert dense[-1] < dense[0] - 2.5
    assert float(last.removeprefix("largest difference: ")) < 1e-4
