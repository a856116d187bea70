"""A real model, Gemma 3 270M in GGUF (Q4_K_M), against transformers on the same dequantised weights."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_reference import greedy
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from longctx.models import Llama, LlamaConfig, Tokenizer, load_checkpoint, load_tokenizer, save_checkpoint, verify
from longctx.models.attend import dense_attend
from longctx.models.gguf import read_header
from longctx.models.params import Params
from longctx.parallel import make_mesh
from longctx.serving import Engine, EngineConfig, ParallelPlan, SamplingParams

FILE = Path(sys.prefix, "models", "gemma-3-270m-q4_k_m.gguf")
TEXT = Path(__file__).parents[2] / "docs" / "design.md"
LENGTH = 2600  # five windows
PROMPT, COUNT = 1100, 24

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.exists(), reason="no Gemma 3 in .venv/models: `make test-all` installs it"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),  # of accelerate
]


class Loaded(NamedTuple):
    """The model here, that of transformers, and the tokens of a text."""

    model: Llama
    params: Params
    reference: transformers.PreTrainedModel
    tokens: np.ndarray


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(FILE)


@pytest.fixture(scope="module")
def loaded(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Through safetensors, as transformers takes minutes to read the vocabulary of a GGUF file."""
    directory = tmp_path_factory.mktemp("gemma3")
    model, params = load_checkpoint(FILE)
    save_checkpoint(directory, model, params)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = np.array(tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:LENGTH])
    yield Loaded(model, params, reference, tokens)
    for file in directory.iterdir():  # a gigabyte
        file.unlink()


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Free the gigabytes of an engine, which is part of cycles, before the next is made."""
    yield
    gc.collect()


def exact_rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str) -> tuple[torch.Tensor, ...]:
    """The cosines and sines of transformers, whose angles are float32 products, in float64."""
    theta, size = self.config.rope_parameters[layer_type]["rope_theta"], self.config.head_dim
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = (position_ids[..., None].double() * frequencies).repeat(1, 1, 2)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def test_the_configuration_is_that_of_the_preset(loaded: Loaded) -> None:
    assert loaded.model.config == LlamaConfig.preset("gemma3-270m")


@pytest.fixture(scope="module")
def generated(loaded: Loaded) -> np.ndarray:
    """The tokens that transformers generates after two windows."""
    tokens = greedy(loaded.reference, loaded.tokens[None, :PROMPT], COUNT)[0]
    assert len(set(tokens.tolist())) > 8, "the reference must vary to show anything"
    return tokens


def test_greedy_tokens_are_those_of_transformers(loaded: Loaded, generated: np.ndarray) -> None:
    model, params, _, tokens = loaded
    whole = np.array([*tokens[:PROMPT], *generated])
    ours = rows_of_logits(model, params, whole, np.arange(PROMPT - 1, PROMPT + COUNT - 1))
    for row, token in zip(ours, generated, strict=True):
        assert row.max() - row[token] < 1e-4  # equal, but where it all but hesitates


PLANS = [
    ParallelPlan(),
    ParallelPlan(context=2),
    ParallelPlan(stage=2),
    ParallelPlan(tensor=2),
    ParallelPlan(context=2, tensor=2, ffn="all"),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_an_engine_generates_the_same_tokens(loaded: Loaded, generated: np.ndarray, plan: ParallelPlan) -> None:
    mesh = make_mesh(plan.stage, plan.context, plan.tensor)
    model, params = load_checkpoint(FILE, mesh)
    config = EngineConfig(
        page_size=64, num_pages=64, max_running=2, max_length=2048, token_budget=256, buckets=(16, 256)
    )
    sampling = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    (output,) = Engine(model, params, config, mesh, plan=plan).generate([loaded.tokens[:PROMPT].tolist()], sampling)
    assert [*output.token_ids] == generated.tolist()


def test_logits_beyond_the_window_are_within_2e_4(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is transformers in float64: in float32 its own error is as large as that of ours."""
    model, params, reference, tokens = loaded
    at = np.r_[0:LENGTH:100, LENGTH - 1]
    ours = rows_of_logits(model, params, tokens, at)
    monkeypatch.setattr(type(reference.model.rotary_emb), "forward", exact_rotary)
    exact = reference.double()
    with torch.no_grad():
        hidden = exact.model(torch.tensor(tokens[None])).last_hidden_state[0, at]
        theirs = exact.lm_head(hidden).numpy()
    assert np.ptp(theirs) > 20
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


def rows_of_logits(model: Llama, params: Params, tokens: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Logits of some rows: those of all rows take gigabytes with 262,144 tokens."""

    @jax.jit
    def run(params: Params, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.size)
        attend = dense_attend(model.config, jnp.float32, positions)
        hidden, _ = model.forward(params, tokens, positions, attend, None)
        return model.logits(params, hidden[at])

    return np.asarray(run(params, jnp.asarray(tokens)))


def test_every_value_and_the_tokenizer_are_sound() -> None:
    assert verify(FILE) == []


def test_tokens_are_those_of_sentencepiece(tokenizer: Tokenizer) -> None:
    """Built of the pieces, scores and types in the file, as the converter of llama.cpp took them from the original."""
    metadata, _ = read_header(FILE)
    proto = sentencepiece_model_pb2.ModelProto()
    columns = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    for id, (token, score, type) in enumerate(zip(*columns, strict=True)):
        # The converter writes the spaces of pieces that users defined as spaces.
        piece = token.replace(" ", "\u2581") if type == 4 else token
        proto.pieces.add(piece=piece, score=float(score), type=2 if id == 3 else int(type))
    for name, value in {
        "model_type": 2,
        "byte_fallback": True,
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
    }.items():
        setattr(proto.trainer_spec, name, value)
    for name, value in {"name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False}.items():
        setattr(proto.normalizer_spec, name, value)
    theirs = SentencePieceProcessor(model_proto=proto.SerializeToString())
    texts = [
        "The capital of France is  Paris.\n\nA héllo 世界 <b>x</b>",
        "def f(x):\n    return  x\t\t+1  \n\n\n#é 12345 3.14159 \U0001f600 naïve กข",
        "   lead",
        TEXT.read_text(encoding="utf-8"),
    ]
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text)
        assert tokenizer.decode(theirs.encode(text)) == text
    assert tokenizer.encode("a")[0] == tokenizer.bos_id == 2
