"""Small models and their completions, computed densely on one device: no cache, no batch, no chunks."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from longctx.kernels import attention
from longctx.models import Llama, LlamaConfig
from longctx.serving import Engine, EngineConfig, ParallelPlan, SamplingParams
from longctx.serving.request.sampling_params import SamplingLevel
from longctx.serving.runner.sampler import Controls, LogitBias, count_tokens, sample_tokens

VOCAB, LENGTH = 50, 176
EOS = 7
NEARLY = 2.0  # of logits: less than their standard deviation in these models


def make_model(
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate: int = 48,
    windows: tuple[int, tuple[bool, ...]] | None = None,
) -> Llama:
    """Make a model; `windows`: tokens of a window, and which layers have it, by default all."""
    sliding = {} if windows is None else dict(zip(("sliding_window", "sliding_layers"), windows, strict=True))
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=intermediate,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        max_positions=256,
        eos_ids=(EOS,),
        **sliding,
    )
    return Llama(config)


def attend_fp8(cache: None, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
    """Dense attention to keys and values in FP8, a scale for each token and KV head."""

    def rounded(x: jax.Array) -> jax.Array:
        scale = jnp.max(jnp.abs(x), -1, keepdims=True) * np.float32(1 / 448)
        return (x / scale).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale

    return attention(q, rounded(k), rounded(v))[0], cache


class Oracle:
    """The completions that a model gives to one sequence alone, with keys and values in FP8 or in its dtype."""

    def __init__(self, model: Llama, kv_dtype: str | None = None) -> None:
        self.model = model
        self.run = jax.jit(functools.partial(model, attend=attend_fp8)) if kv_dtype else model
        self.params = model.init(jax.random.key(0), initializer_range=0.4)
        self._logits: dict[tuple[int, ...], np.ndarray] = {}

    def logits_after(self, tokens: tuple[int, ...]) -> np.ndarray:
        if tokens not in self._logits:
            self.prime(tokens, len(tokens))
        return self._logits[tokens]

    def prime(self, tokens: Sequence[int], first: int) -> None:
        """Compute the logits after the first so many tokens, and after each that follows, at once."""
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(tokens)] = tokens
        logits, known = np.asarray(self.run(self.params, padded)), tuple(map(int, tokens))
        self._logits |= {known[:length]: logits[length - 1] for length in range(first, len(tokens) + 1)}

    def expected_tokens(
        self, prompt: list[int], params: SamplingParams, completion: int = 0, eos: int | None = EOS
    ) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + params.max_tokens:
            seen = count_tokens(np.array(prompt), np.array(tokens[len(prompt) :], int), VOCAB)
            controls = Controls.row(params, params.seed or 0, completion)
            logits, bias = self.logits_after(tuple(tokens)), LogitBias.row(params)
            tokens.append(int(_draw(logits, seen, controls, np.int32(len(tokens)), bias)))
            if tokens[-1] == eos and not params.ignore_eos:
                break
        return tokens[len(prompt) :]

    def follows(self, tokens: list[int], prompt: list[int], params: SamplingParams, completion: int = 0) -> list[bool]:
        """Whether each token is the one that is drawn after the tokens before it; it has to be nearly so.

        Where keys are rounded to FP8, a sum in another order may round one the other way, and logits differ by up to
        the error of FP8 itself (docs/fp8_pages.md). A wrong key gives another token altogether.
        """
        found = []
        self.prime([*prompt, *tokens], len(prompt))
        for at, token in enumerate(tokens):
            seen = count_tokens(np.array(prompt), np.array(tokens[:at], int), VOCAB)
            controls, bias = Controls.row(params, params.seed or 0, completion), LogitBias.row(params)
            logits, position = self.logits_after((*prompt, *tokens[:at])), np.int32(len(prompt) + at)
            nearly = logits + NEARLY * (np.arange(VOCAB) == token).astype(np.float32)
            found.append(int(_draw(logits, seen, controls, position, bias)) == token)
            assert found[-1] or int(_draw(nearly, seen, controls, position, bias)) == token
        return found

    def agrees(self, tokens: list[int], prompt: list[int], params: SamplingParams, completion: int = 0) -> bool:
        """Whether tokens are those expected, up to a difference where the two best logits are closer than 1e-4."""
        self.prime([*prompt, *tokens], len(prompt))
        expected = self.expected_tokens(prompt, params, completion)
        if tokens == expected:
            return True
        at = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b)
        second, best = np.sort(self.logits_after((*prompt, *expected[:at])))[-2:]
        return bool(best - second < 1e-4)


@jax.jit
def _draw(logits: jax.Array, seen: jax.Array, controls: jax.Array, position: jax.Array, bias: LogitBias) -> jax.Array:
    logits, seen, controls, position, *bias = (x[None] for x in (logits, seen, controls, position, *bias))
    return sample_tokens(logits, SamplingLevel.FILTERS, Controls.unpack(controls), position, seen, LogitBias(*bias))[0]


ORACLE = Oracle(make_model())
MODEL, PARAMS = ORACLE.model, ORACLE.params
logits_after, expected_tokens, agrees = ORACLE.logits_after, ORACLE.expected_tokens, ORACLE.agrees


def make_engine(
    params: dict | None = None, oracle: Oracle = ORACLE, plan: ParallelPlan | None = None, **options: object
) -> Engine:
    """Make an engine; all engines have the same shapes, so those with one plan share compiled programs."""
    shapes = {"page_size": 8, "num_pages": 24, "max_running": 6, "token_budget": 32, "buckets": (8, 32)}
    shapes |= {"chunking": "static"}
    config = EngineConfig(**(shapes | options))  # type: ignore[arg-type]
    return Engine(oracle.model, oracle.params if params is None else params, config, plan=plan)
