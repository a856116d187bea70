"""The models of the papers: their parameters against published totals."""

import pytest

from longctx.simulation.models import MODELS, model, num_parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3-8b", 8.03), ("llama-3-70b", 70.55), ("llama-3-405b", 405.85), ("llama-2-70b", 68.98)],
)
def test_parameters_are_the_published_ones(name: str, billions: float) -> None:
    """As the models' cards on Hugging Face count them."""
    assert num_parameters(MODELS[name]) / 1e9 == pytest.approx(billions, abs=0.005)
    assert MODELS[name].max_positions > 10_000_000


def test_the_405b_model_is_also_there_with_fp8() -> None:
    fp8 = MODELS["llama-3-405b-fp8"]
    assert num_parameters(fp8) == num_parameters(MODELS["llama-3-405b"])
    assert fp8.quantization is not None
    assert sum(1 for names in fp8.quantization.layers if names == ("w_gate", "w_up", "w_down")) == 124


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model must be one of llama-3-8b, .*, got 'gpt'"):
        model("gpt")
