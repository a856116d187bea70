"""Train the built-in model: a Llama of 0.66 million parameters that finds pass keys in long texts.

    python examples/train_tiny.py --out longctx/models/tiny      # the recipe of the weights that are shipped
    python examples/train_tiny.py --out tiny --steps 20          # a short run; the same command resumes it

It is trained on at most 768 tokens at once. What makes that work, in order of effect:

* **Initial weights that match names** (`point_heads`). Initially, heads of layers 0 and 1 look a few bytes back, and
  heads of the layers above look for places whose earlier bytes are the same. So the model finds the statement of a
  name more often than not before any training. From ordinary initial weights, it learns for hundreds of steps only to
  continue digits by the digits before them, and guesses the first.
* **From one digit to five, from few statements to many, from dense to sparse.** With keys of one digit, only the
  name determines the answer. Every document must have several statements: with one, the name does not matter, and the
  model forgets to use it.
* **Position jumps.** Between sentences the position jumps by up to 2**17, so that short sequences contain long
  distances. The rotary base is so large that half of each head hardly turns over such distances.
* **Multiplicity.** Adding log(m) to the attention logit of a key has the effect of m copies of it. Filler that is far
  away counts as up to 1,024 copies, so heads must be sharp enough for such a long context.
* **Questions do not see each other.** All questions of a sequence directly follow the document, each in a segment of
  its own, as a question does in use.
"""

import argparse
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from einops import rearrange
from evaluate_tiny import exact_match
from optax.contrib import MuonDimensionNumbers, muon
from tiny_batches import BOS, EOS, Batch, make_batch
from tqdm import tqdm

from longctx.models import Llama, LlamaConfig, RopeConfig, save_checkpoint

CONFIG = LlamaConfig(
    vocab_size=258,
    hidden_size=128,
    intermediate_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope=RopeConfig(theta=1e11),
    max_positions=131072,
    bos_id=BOS,
    eos_ids=(EOS,),
)
STEPS = 1350
KEEP_NEAR = {950: 0, 1150: 1}  # the steps at which `keep_near` changes a layer
NEAR = 64  # positions; filler further away counts as many copies


def init_params(model: Llama) -> Any:
    """Make random parameters that keep unit scale through every layer, with the heads of `point_heads`."""
    params = model.init(jax.random.key(0), initializer_range=1.0)
    layers, config = params["layers"], model.config
    for name in ("wq", "wk", "wv", "w_gate", "w_up"):
        layers[name] *= config.hidden_size**-0.5
    layers["wo"] *= 0.5 * (config.num_heads * config.head_dim) ** -0.5
    layers["w_down"] *= 0.5 * config.intermediate_size**-0.5
    params["lm_head"] *= 0.2 * config.hidden_size**-0.5
    return point_heads(params, config)


def point_heads(params: Any, config: LlamaConfig) -> Any:
    r"""Make heads of layers 0 and 1 look a given number of bytes back, and those above look for equal context.

    The first 8 hidden dimensions are the same for every byte. A head whose queries and keys read only those
    depends on the distance only, through the rotary embedding: with queries turned by `offset` it looks that
    far back. The name that was asked for ends 5 bytes before the answer begins, and so it does in the
    statement ("lemon is 4", "lemon?\nA: "): after two such layers, both places hold the same name, in
    dimensions that nothing else is written to at first. The heads above compare only those, and only in the
    rotary pairs that stand nearly still, whatever the distance.
    """
    params = jax.tree.map(np.array, params)
    layers, constant, turning = params["layers"], slice(0, 8), 4
    half, group = config.head_dim // 2, config.num_heads // config.num_kv_heads
    frequencies = config.rope.theta ** (-np.arange(turning) / half)

    params["embed"][:, constant] = 1.0 + 0.1 * params["embed"][:, constant]
    for layer, offsets in enumerate([(1, 2, 3, 4), (4, 5, 7, 9)]):
        layers["wq"][layer] *= 0.5
        layers["wk"][layer] *= 0.25
        layers["wq"][layer, constant] = layers["wk"][layer, constant] = 0
        layers["wk"][layer, constant, :, :turning] = 1.5
        for head, offset in enumerate(offsets):
            layers["wq"][layer, constant, head, :turning] = 1.5 * np.cos(offset * frequencies)
            layers["wq"][layer, constant, head, half : half + turning] = -1.5 * np.sin(offset * frequencies)

    params["embed"][:, 64:] = 0
    for layer, written in enumerate([slice(64, 96), slice(96, 128)]):
        layers["wv"][layer, constant] = 0
        layers["w_down"][layer] = 0
        kept = np.zeros(config.hidden_size)
        kept[written] = 2.0
        layers["wo"][layer] *= kept
    layers["wk"][2:, :96] = 0
    layers["wk"][2:] *= 2.5
    still = half // 2  # these and later ones turn by less than half a circle in 100,000 positions
    layers["wk"][2:, ..., :still] = layers["wk"][2:, ..., half : half + still] = 0
    layers["wq"][2:] = np.repeat(layers["wk"][2:], group, axis=2)
    return jax.tree.map(jnp.asarray, params)


def keep_near(params: Any, layer: int) -> Any:
    """Make the heads of layer 0 or 1 unable to look far away.

    The rotary pairs that distinguish small distances have periods of 6, 31, 149 and 725 tokens, which nearly
    meet again after 737: there every head would look once more. In the slower pairs 4 to 6, queries and keys
    become one constant, the same for every byte, which adds 100 cos(frequency * distance) to the scores.
    """
    params = jax.tree.map(np.array, params)
    layers, half = params["layers"], CONFIG.head_dim // 2
    seen = attention_inputs(params, layer).astype(np.float64)
    # The direction in which all inputs measure 1; of layer 1's, which vary, with a little ridge.
    gram = seen.T @ seen
    gram += (1e-3 * layer * np.mean(seen**2) * len(seen)) * np.eye(len(gram))
    direction = np.linalg.lstsq(gram, seen.sum(0), rcond=None)[0]
    for name in ("wq", "wk"):
        layers[name][layer, ..., 4:7] = direction[:, None, None] * np.sqrt(100 * CONFIG.head_dim**0.5)
        layers[name][layer, ..., half + 4 : half + 7] = 0
    return jax.tree.map(jnp.asarray, params)


def attention_inputs(params: Any, layer: int) -> np.ndarray:
    """The inputs `[tokens, D]` of the queries and keys of layer 0 or 1: for every byte, or over a batch."""
    layers = params["layers"]
    if layer == 0:
        seen = params["embed"][np.array([ord("\n"), *range(32, 127), BOS, EOS])]
        scale = np.sqrt(np.mean(seen**2, axis=-1, keepdims=True) + CONFIG.norm_eps)
        return seen / scale * layers["attn_norm"][0]
    # A model that ends after layer 0, and whose last norm is layer 1's first.
    shallow = Llama(dataclasses.replace(CONFIG, num_layers=1))
    cut = {"layers": jax.tree.map(lambda stack: stack[:1], layers), "final_norm": layers["attn_norm"][1]}
    batch = make_batch(5000)
    batch = batch._replace(log_multiplicity=0 * batch.log_multiplicity)
    hidden = final_hidden(shallow, params | cut, batch)
    return np.asarray(hidden)[batch.segments >= 0]


def final_hidden(model: Llama, params: Any, batch: Batch) -> jax.Array:
    """Hidden states `[B, T, D]`, by dense attention that separates questions and counts far filler many times."""
    seen, distance = batch.segments[:, None, :], batch.positions[:, :, None] - batch.positions[:, None, :]
    far = (distance > NEAR) & batch.is_filler[:, None, :]
    visible = (seen == 0) | (seen == batch.segments[:, :, None])
    bias = jnp.where(far, batch.log_multiplicity[:, None, None], 0.0)
    bias = jnp.where(visible & jnp.tri(batch.tokens.shape[1], dtype=bool)[None], bias, -1e30)

    def attend(cache: None, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        q = rearrange(q, "b t (k g) h -> b k (g t) h", k=k.shape[2]) * CONFIG.head_dim**-0.5
        scores = jnp.einsum("bkth,bskh->bkts", q, k).reshape(*q.shape[:2], -1, *bias.shape[1:])
        shares = jax.nn.softmax(scores + bias[:, None, None]).reshape(*q.shape[:3], -1)
        out = jnp.einsum("bkts,bskh->bkth", shares, v)
        return rearrange(out, "b k (g t) h -> b t (k g) h", t=bias.shape[1]), cache

    return model.forward(params, batch.tokens, batch.positions, attend, None)[0]


def loss(model: Llama, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The weighted cross entropy per byte of an answer, and the share of those bytes that are right."""
    predicted = model.logits(params, final_hidden(model, params, batch))
    losses = optax.softmax_cross_entropy_with_integer_labels(predicted, batch.targets)
    answers = batch.weights >= 1
    right = jnp.sum((predicted.argmax(-1) == batch.targets) & answers) / jnp.sum(answers)
    return jnp.sum(losses * batch.weights) / jnp.sum(answers), right


class State(NamedTuple):
    step: jax.Array
    params: Any
    optimizer: optax.OptState
    average: Any  # of the parameters over about a hundred steps; it is evaluated and saved


def make_optimizer() -> optax.GradientTransformation:
    """Muon for the matrices of the layers, with each head of q, k and v as a matrix; Adam for the rest."""

    def matrices(params: Any) -> Any:
        layers = dict.fromkeys(params["layers"])
        layers |= dict.fromkeys(("wq", "wk", "wv"), MuonDimensionNumbers(1, 3))
        layers |= dict.fromkeys(("w_gate", "w_up", "w_down"), MuonDimensionNumbers(1, 2))
        layers["wo"] = MuonDimensionNumbers((1, 2), 3)
        return dict.fromkeys(params) | {"layers": layers}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            learning_rate=learning_rate(0.02),
            adam_learning_rate=learning_rate(3e-3),
            adam_b2=0.98,
            muon_weight_dimension_numbers=matrices,
        ),
    )


def learning_rate(peak: float) -> optax.Schedule:
    """It rises for 50 steps, is constant until step 500, falls to 0 at step 1150, and then once more falls to 0."""
    points = {0: 0.0, 50: peak, 500: peak, 850: 0.3 * peak, 1150: 0.0, 1151: 0.12 * peak, STEPS: 0.0}
    return lambda step: jnp.interp(step, jnp.array(list(points)), jnp.array(list(points.values())))


@functools.cache
def make_update(model: Llama) -> Callable[[State, Batch], tuple[State, jax.Array, jax.Array]]:
    """Compile a training step, which also returns the loss and the share of answer bytes that were right."""
    optimizer = make_optimizer()

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: State, batch: Batch) -> tuple[State, jax.Array, jax.Array]:
        value_and_grad = jax.value_and_grad(functools.partial(loss, model), has_aux=True)
        (value, right), gradient = value_and_grad(state.params, batch)
        change, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, change)
        average = optax.incremental_update(params, state.average, 0.01)
        return State(state.step + 1, params, optimizer_state, average), value, right

    return update


def batches(first: int, stop: int) -> Any:
    """Iterate over the batches of these steps, which a thread makes ahead of time."""
    ahead: queue.Queue[Batch] = queue.Queue(maxsize=4)

    def make() -> None:
        for step in range(first, stop):
            ahead.put(make_batch(step))

    threading.Thread(target=make, daemon=True).start()
    for _ in range(first, stop):
        yield ahead.get()


def train(out: Path, training_state: Path, steps: int, save_every: int, num_questions: int = 64) -> None:
    """Train up to step `steps`, from the last saved state if there is one, and save the checkpoint."""
    model = Llama(CONFIG)
    params = init_params(model)
    state = State(jnp.int32(0), params, make_optimizer().init(params), jax.tree.map(jnp.copy, params))
    update = make_update(model)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(training_state.absolute(), options=options) as manager:
        if manager.latest_step() is not None:
            state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))
        first = int(state.step)
        with tqdm(total=steps, initial=first, unit="step") as bar:
            for step, batch in enumerate(batches(first, steps), start=first + 1):
                if step - 1 in KEEP_NEAR:
                    near = functools.partial(keep_near, layer=KEEP_NEAR[step - 1])
                    state = state._replace(params=near(state.params), average=near(state.average))
                state, value, right = update(state, batch)
                bar.update()
                bar.set_postfix(loss=f"{value:.3f}", answer_bytes=f"{right:.1%}", refresh=False)
                if step % save_every == 0 or step == steps:
                    manager.save(step, args=ocp.args.StandardSave(state))
                    share = exact_match(model, state.average, 512, num_questions)
                    bar.write(f"step {step}: {share:.1%} of questions on 512 tokens exactly right")
    save_checkpoint(out, model, state.average)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=STEPS, help="the last step (default: %(default)s)")
    parser.add_argument("--state", type=Path, help="directory of training states (default: OUT.training)")
    parser.add_argument("--save-every", type=int, default=100, help="steps between states (default: %(default)s)")
    args = parser.parse_args()
    state = args.state or args.out.with_name(args.out.name + ".training")
    train(args.out, state, args.steps, args.save_every)


if __name__ == "__main__":
    main()
