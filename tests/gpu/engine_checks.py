"""An engine with 8 of the layers of Llama-3 8B and random weights: times, tokens, launches, pages, memory."""

import dataclasses
import functools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from gpu_worker import Context, Figures

from longctx.kernels import selection
from longctx.models import Llama, LlamaConfig
from longctx.models.attend import dense_attend
from longctx.serving import Engine, EngineConfig, Request, SamplingParams, StepMetrics

LAYERS = 8
# Two logits in bfloat16 may change places where they differ by less than this times the error of such a computation.
_ERRORS, _ABSOLUTE = 2.5, 2e-3
MAX_COMPARED = 8  # sequences whose first difference is looked at


@functools.cache
def _model(is_small: bool) -> tuple[Llama, Any]:
    if is_small:
        sizes = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4}
        config = LlamaConfig(**sizes, num_kv_heads=2, head_dim=16, max_positions=256)
    else:
        config = dataclasses.replace(LlamaConfig.preset("llama-3-8b"), num_layers=LAYERS, max_positions=2**17)
    model = Llama(config)
    return model, model.init(jax.random.key(0), jnp.bfloat16)


def _engine(context: Context, **options: Any) -> Engine:
    model, params = _model(context.small)
    sizes = {"max_length": 256, "num_pages": 40} if context.small else {"max_length": 9216, "num_pages": 1536}
    config = {"page_size": 64, "token_budget": 2048, "buckets": (8, 64, 2048), "prefix_cache": False}
    return Engine(model, params, EngineConfig(**config | sizes | options))


def _requests(context: Context, count: int, length: int, tokens: int, **sampling: Any) -> list[Request]:
    rng = np.random.default_rng(length)
    if context.small:
        length, tokens = length // 64, min(tokens, 4)
    vocab_size = _model(context.small)[0].config.vocab_size
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, **sampling)
    return [Request(rng.integers(0, vocab_size, length).tolist(), params) for _ in range(count)]


def _batch(context: Context, batch: int) -> int:
    return min(batch, 4) if context.small else batch


def _steps(engine: Engine, requests: list[Request]) -> list[StepMetrics]:
    """Of the second of two equal runs: the first one compiles."""
    engine.generate(requests)
    steps: list[StepMetrics] = []
    engine.add_monitor(steps.append)
    engine.generate(requests)
    return steps


def _decodes(steps: list[StepMetrics], batch: int) -> list[StepMetrics]:
    """The steps of decodes alone, of all sequences."""
    found = [step for step in steps if step.decodes == batch and not step.chunks][1:]
    assert found, f"no step has {batch} decodes alone"
    return found


def decode(context: Context, batch: int) -> Figures:
    """Decodes after 1,024 tokens: seconds of a step, bytes that it has to read, and launches in a profile."""
    engine, count = _engine(context), _batch(context, batch)
    # The last prompt is read before the first sequence has all its tokens.
    steps = _decodes(_steps(engine, _requests(context, count, 1024, 128)), count)
    seconds, keys = statistics.median(step.seconds for step in steps), count * (1024 + 128 // 2)  # in the middle
    config, params = engine.model.config, _model(context.small)[1]
    weights = sum(x.nbytes for x in jax.tree.leaves(params)) - params["embed"].nbytes * (not config.tie_embeddings)
    cache = keys * 4 * config.num_layers * config.num_kv_heads * config.head_dim
    context.note(
        {"step_seconds": seconds, "steps": len(steps), "batch": count, "tokens_per_second": count / seconds}
        | {"weight_bytes": weights, "cache_bytes": cache}
    )
    return profile(engine, _requests(context, count, 128, 16))


def profile(engine: Engine, requests: list[Request]) -> Figures:
    """Launches of graphs and kernels by the host, and the longest kernels, of all steps of a run that is compiled."""
    engine.generate(requests)
    steps: list[StepMetrics] = []
    engine.add_monitor(steps.append)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            engine.generate(requests)
        [file] = Path(folder).rglob("*.xplane.pb")
        return read_profile(jax.profiler.ProfileData.from_file(str(file)), len(steps))


def read_profile(data: Any, num_steps: int) -> Figures:
    """Of a step, on average: launches by the host, and the kernels that took longest on the devices."""
    graphs = kernels = copies = 0
    longest: dict[str, float] = {}
    for plane in data.planes:
        on_device = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            for event in line.events:
                name = event.name
                graphs += not on_device and "GraphLaunch" in name
                kernels += not on_device and "LaunchKernel" in name
                copies += not on_device and "Memcpy" in name
                if on_device and line.name.startswith("Stream"):
                    longest[name] = longest.get(name, 0.0) + event.duration_ns / num_steps / 1e3
    top = sorted(longest, key=longest.__getitem__, reverse=True)[:8]
    per_step = {"graph_launches": graphs, "kernel_launches": kernels, "memory_copies": copies}
    return {
        "steps_profiled": num_steps,
        "a_step": {name: count / num_steps for name, count in per_step.items()},
        "longest_us_a_step": {name[:80]: round(longest[name], 1) for name in top},
    }


def prefill(context: Context) -> Figures:
    """A prompt of 8,192 tokens, in chunks of 2,048."""
    steps = [step for step in _steps(_engine(context), _requests(context, 1, 8192, 2)) if step.chunks][1:]
    tokens = sum(count for step in steps for _, count in step.chunks)
    return {"tokens_per_second": tokens / sum(step.seconds for step in steps)} if steps else {}


def tokens(context: Context) -> Figures:
    """The same tokens as with attention by XLA, but where two logits are closer than bfloat16 tells apart.

    Raises:
      AssertionError: a sequence differs elsewhere.
    """
    requests = _requests(context, _batch(context, 64), 256, 32)
    got = [output.token_ids for output in _engine(context).generate(requests)]
    jax.clear_caches()  # compiled steps have what they were compiled with
    refused = mock.Mock(
        side_effect=lambda case, name: None if name == "xla" else "is not what tokens are compared with"
    )
    with mock.patch.object(selection, "unsupported_reason", refused):
        want = [output.token_ids for output in _engine(context).generate(requests)]
        assert refused.called, "the engine did not ask which implementation to take"
        jax.clear_caches()
    prompts = [request.prompt for request in requests]
    found = compare_tokens(*_model(context.small), prompts, got, want)
    return found | {"distinct": len({token for sequence in got for token in sequence})}


def compare_tokens(
    model: Llama, params: Any, prompts: list[Any], got: list[list[int]], want: list[list[int]]
) -> Figures:
    """Compare greedy tokens with those by XLA.

    Two may differ where the logits by XLA are 1e-4 apart or less, or in bfloat16 less than the error of such logits
    explains: 2.5 times the error of the computation by XLA, plus 2e-3. After the first difference nothing is compared.

    Raises:
      AssertionError: a sequence differs elsewhere.
    """
    different = [i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]]
    figures: Figures = {"sequences": len(got), "equal": len(got) - len(different), "largest_gap": 0.0}
    is_half = params["embed"].dtype.itemsize == 2
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params) if different and is_half else params
    for i in different[:MAX_COMPARED]:
        at = next((n for n, (x, y) in enumerate(zip(got[i], want[i], strict=False)) if x != y), None)
        assert at is not None, f"sequence {i} has {len(got[i])} tokens instead of {len(want[i])}"
        sequence, last = jnp.asarray([*prompts[i], *want[i]]), len(prompts[i]) + at - 1
        rough, exact = (np.asarray(_logits(model, weights, sequence, last)) for weights in (params, wide))
        gap = float(rough.max() - rough[got[i][at]])
        allowed = _ERRORS * float(np.abs(rough - exact).max()) + _ABSOLUTE if is_half else 1e-4
        assert gap <= allowed, f"sequence {i} differs at token {at}: logits {gap:.1e} apart, more than {allowed:.1e}"
        figures["largest_gap"] = max(figures["largest_gap"], gap)
    return figures


@functools.partial(jax.jit, static_argnums=0)
def _logits(model: Llama, params: Any, tokens: jax.Array, at: int) -> jax.Array:
    """Of one token, by XLA. Later ones don't matter, so that sequences of one length are one program."""
    positions = jnp.arange(len(tokens))
    attend = dense_attend(model.config, params["embed"].dtype, positions, implementation="xla")
    hidden, _ = model.forward(params, tokens, positions, attend, None)
    return model.logits(params, hidden[at][None])[0].astype(jnp.float32)


def transfers(context: Context) -> Figures:
    """Pages to the host and back, as tiers and other engines move them.

    Raises:
      AssertionError: they come back changed.
    """
    engine = _engine(context)
    engine.generate(_requests(context, 4, 1024, 2))  # pages with content
    with engine.lend_executor() as executor:
        runner: Any = executor.runner  # type: ignore[attr-defined]
        runner.transfer.compile()
        count = 4 if context.small else 64
        layers, pages = (0, runner.transfer.layout.num_layers), list(range(count))
        there = [page + count for page in pages]
        blocks, figures = None, {"bytes": count * runner.transfer.layout.page_bytes}
        for _ in range(2):  # the first time compiles
            begun = time.perf_counter()
            blocks = runner.read_pages(pages, layers).result()
            read = time.perf_counter()
            for block in blocks:
                runner.write_pages(there, block)
            figures |= {"read_seconds": read - begun, "write_seconds": time.perf_counter() - read}
        for block, back in zip(blocks, runner.read_pages(there, layers).result(), strict=True):
            assert np.array_equal(np.asarray(block.data), np.asarray(back.data)), "pages come back changed"
    return figures


def sampling(context: Context) -> Figures:
    """Seconds of a step of 64 decodes by how tokens are drawn."""
    engine, count = _engine(context), _batch(context, 64)
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "temperature 1": {"temperature": 1.0},
        "temperature 1, top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
        "temperature 1, top_k 50": {"temperature": 1.0, "top_k": 50},
    }
    seconds: dict[str, float] = {}
    for name, way in ways.items():
        steps = _steps(engine, _requests(context, count, 128, 32, **way))
        seconds[name] = statistics.median(step.seconds for step in _decodes(steps, count))
        context.note({"batch": count, "step_seconds": seconds})
    return {}


def memory(context: Context) -> Figures:
    """What an engine with default pages takes, and whether its steps have room beside them."""
    model, params = _model(context.small)
    sizes = {"max_length": 256, "buckets": (512,)} if context.small else {"buckets": (64, 512)}
    engine = Engine(model, params, EngineConfig(**sizes))
    stats = jax.devices()[0].memory_stats() or {}
    context.note({"pages": engine.num_pages, "tokens": engine.num_pages * engine.config.page_size})
    context.note({"in_use_bytes": stats.get("bytes_in_use"), "limit_bytes": stats.get("bytes_limit")})
    engine.generate(_requests(context, _batch(context, 64), 1024, 8))
    return {"peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")}
