"""The models of the papers: their parameters against published totals."""

import pytest

from longctx.models.footprint import weight_bytes
from longctx.simulation.models import MODELS


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3-8b", 8.03), ("llama-3-70b", 70.55), ("llama-3-405b", 405.85), ("llama-2-70b", 68.98)],
)
def test_parameters_are_the_published_ones(name: str, billions: float) -> None:
    """As the models' cards on Hugging Face count them."""
    assert weight_bytes(MODELS[name]) / 2e9 == pytest.approx(billions, abs=0.005)
    assert MODELS[name].max_positions > 10_000_000


def test_the_405b_model_is_also_there_with_fp8() -> None:
    quantization = MODELS["llama-3-405b-fp8"].quantization
    assert quantization is not None
    assert sum(1 for names in quantization.layers if names == ("w_gate", "w_up", "w_down")) == 124
