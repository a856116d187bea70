"""What of a step for H100, or for an older GPU, is captured in command buffers, and what is not."""

import itertools
import re
from pathlib import Path

import pytest
from hlo import copied_bytes
from thunks import CONFIG, Sequence, Thunk, thunks_of

from longctx import xla_flags
from longctx.serving.request.sampling_params import SamplingLevel

# XLA captures no fewer, as a graph must be launched too.
LEAST = 5


def between_collectives(thunks: list[Thunk]) -> list[list[Thunk]]:
    """Runs of thunks that aren't captured and follow each other, without collectives, which are in none."""

    def is_collective(thunk: Thunk) -> bool:
        return thunk.kind in COLLECTIVES or "AsyncStart" in thunk.within

    groups = itertools.groupby(thunks, lambda thunk: (thunk.is_captured or is_collective(thunk), thunk.within))
    return [[*group] for (is_other, _), group in groups if not is_other]


COLLECTIVES = {"AllGather", "AllReduce", "AllToAll", "CollectivePermute", "AsyncDone"}


def check_one_gpu(folder: Path, flags: str, model: str, num_layers: int, temp: int) -> None:
    """One command buffer with all layers, and two attention kernels in each."""
    found = thunks_of(folder, (1, 1, 1), (0, 0, 64), flags, model=model)
    assert found.outermost == ["CommandBuffer"]
    assert all(thunk.is_captured for thunk in found.leaves)
    kernels = [thunk for thunk in found.leaves if thunk.kind == "CustomCall"]
    assert len(kernels) == 2 * num_layers
    assert all(thunk.within == ("CommandBuffer",) for thunk in kernels)
    assert copied_bytes(found.hlo, "params") == 0
    assert found.temp <= temp << 20


def test_a_step_on_one_gpu_is_one_command_buffer_and_copies_no_weights(tmp_path: Path) -> None:
    check_one_gpu(tmp_path, xla_flags(), "small", CONFIG.num_layers, temp=16)


def test_a_step_on_one_a100_is_one_command_buffer_with_the_triton_kernels(tmp_path: Path) -> None:
    """They are custom kernels, as XLA's own are."""
    found = thunks_of(tmp_path, (1, 1, 1), (0, 0, 64), xla_flags(), model="small@A100")
    assert found.outermost == ["CommandBuffer"]
    assert all(thunk.is_captured for thunk in found.leaves)
    for name in ("paged_attention", "merge_pieces"):
        assert (
            len(re.findall(rf'custom-call\(.*__gpu\$xla.gpu.triton.*name = "{name}"', found.hlo)) == CONFIG.num_layers
        )
    assert 'custom_call_target="mosaic_gpu' not in found.hlo
    assert copied_bytes(found.hlo, "params") == 0


# Kernels of a level, its product with the head included, at most.
@pytest.mark.parametrize(
    ("level", "most", "flags"),
    [
        pytest.param(SamplingLevel.TEMPERATURE, 12, xla_flags(), id="temperature, our flags"),
        pytest.param(SamplingLevel.LOGPROBS, 140, "", id="logprobs, default flags", marks=pytest.mark.slow),
    ],
)
def test_sampling_on_one_gpu_is_one_command_buffer(tmp_path: Path, level: SamplingLevel, most: int, flags: str) -> None:
    """With any flags: there is no loop and no branch in it."""
    found = thunks_of(tmp_path, (1, 1, 1), (0, 0, 64), flags, level)
    assert found.outermost == ["CommandBuffer"]
    assert LEAST < len(found.leaves) <= most


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", xla_flags()], ids=["without", "with"])
def test_so_is_one_of_llama_3_8b_with_the_flags_and_without(flags: str, tmp_path: Path) -> None:
    check_one_gpu(tmp_path, flags, "llama-3-8b", 32, temp=32)


def check_pallas(found: Sequence) -> None:
    assert [thunk.kind for thunk in found.leaves].count("CustomCall") >= 6  # of sharded, replicated and local rows


@pytest.mark.slow
def test_on_a_mesh_all_but_collectives_is_captured(tmp_path: Path) -> None:
    found = thunks_of(tmp_path, (2, 2, 2), (16, 16, 32), xla_flags())
    check_pallas(found)
    assert not any(thunk.is_captured for thunk in found.leaves if thunk.kind in COLLECTIVES)
    runs = between_collectives(found.leaves)
    assert max(map(len, runs)) < LEAST
    assert sum(thunk.is_captured for thunk in found.leaves) > 2 * sum(map(len, runs))


@pytest.mark.slow
def test_collectives_are_captured_if_asked_for(tmp_path: Path) -> None:
    found = thunks_of(tmp_path, (1, 2, 2), (16, 16, 32), xla_flags(collectives=True))
    check_pallas(found)
    assert {*found.outermost} <= {"CommandBuffer", "CustomKernel"}
    outside = [thunk for thunk in found.leaves if not thunk.is_captured]
    assert len(outside) < LEAST
    assert not any(thunk.kind in COLLECTIVES for thunk in outside)
