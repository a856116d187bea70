"""Fine-tune a Hugging Face checkpoint on long packed documents, each sequence over all devices in a ring.

    python examples/finetune_llama.py --out tuned                   # the built-in model, 8 CPU devices
    python examples/finetune_llama.py --model SmolLM2-135M --data books --out tuned --length 32768
    python examples/finetune_llama.py --compare 10                  # the same steps in a ring and on one device
    python examples/finetune_llama.py --memory 8192 16384 32768     # bytes of a step, compiled but not run

The same command resumes a run that was interrupted, with the losses of one that was not. Documents are the text files
of a directory, by default long modules of Python's standard library.

To train a model of your own on sequences that exceed one device, it needs what `longctx.nnx.to_nnx` gives a Llama:

* **Attention over the ring.** All else in a transformer works token by token, on whichever device has the token: put
  `longctx.nnx.ContextParallelAttention`, or `longctx.parallel.ring_pass_kv`, where your attention is.
* **Positions and segment ids with the tokens.** They say what a token sees, so documents can be packed, and any device
  may have any token.
* **A loss that is summed over the ranks** and divided by the number of all their targets. Means of ranks are wrong, as
  ranks have different numbers of targets.
* **Nothing that grows with the whole sequence.** Layers are computed again in the backward pass (`remat`); the wide
  middle of the feed-forward and the logits exist for `--chunk` tokens at a time only.
"""

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from finetune_states import TrainingStates
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from packed_documents import Batch, PackedDocuments, encode_documents, read_documents
from tqdm import tqdm

from longctx import plotting
from longctx.models import Llama, checkpoint_fingerprint, load_checkpoint, load_tokenizer, save_checkpoint
from longctx.models.builtin import TINY
from longctx.nnx import from_nnx, to_nnx
from longctx.parallel import make_mesh

TOLERANCE = 1e-4  # of a loss in a ring, from that on one device


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW on clipped gradients, averaged over `--accumulate` sequences; the rate rises, then falls as a cosine."""
    rate = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, args.warmup, args.steps, args.learning_rate / 10)
    adamw = optax.adamw(rate, b2=0.95, weight_decay=args.weight_decay, mask=decays)
    steps = optax.chain(optax.clip_by_global_norm(args.clip), adamw)
    return optax.MultiSteps(steps, args.accumulate).gradient_transformation()


def decays(params: Any) -> Any:
    """Which parameters decay: all but the scales of norms, which lie about 1."""
    return jax.tree.map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)


def make_module(model: Llama, params: Any, mesh: Mesh | None, args: argparse.Namespace) -> nnx.Module:
    """The model in a ring over `mesh`, its parameters sharded too; None: on one device, with nothing recomputed."""
    if mesh is None:
        return to_nnx(model, params)
    return to_nnx(model, params, mesh=mesh, method=args.method, remat=True, chunk_size=args.chunk, fsdp=True)


def make_training(module: nnx.Module, mesh: Mesh | None, args: argparse.Namespace) -> nnx.Optimizer:
    """The optimizer of a module. Its arrays are placed as a step returns them, else the second step compiles anew."""
    optimizer = nnx.Optimizer(module, make_optimizer(args), wrt=nnx.Param)
    everywhere = jax.devices()[0] if mesh is None else NamedSharding(mesh, P())

    def place(x: jax.Array) -> jax.Array:
        return x if mesh is not None and isinstance(x.sharding, NamedSharding) else jax.device_put(x, everywhere)

    nnx.update(optimizer, jax.tree.map(place, nnx.state(optimizer)))
    return optimizer


def mean_loss(module: nnx.Module, batch: Batch) -> jax.Array:
    """The cross entropy of a token, in nats: a float32 scalar."""
    total, count = module.loss(*batch)
    return total / jnp.maximum(count, 1)  # a sequence of the last tokens of documents has no target


@nnx.jit(donate_argnums=(0, 1))
def train_step(module: nnx.Module, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """Take in one sequence, and change the parameters if it is the last of a step. Returns its loss."""
    value, gradient = nnx.value_and_grad(mean_loss)(module, batch)
    optimizer.update(module, gradient)
    return value


def train(
    module: nnx.Module, optimizer: nnx.Optimizer, data: PackedDocuments, steps: range, accumulate: int
) -> Iterator[float]:
    """Yield the loss of each step, the mean over its sequences, after the parameters have changed."""
    for step in steps:
        losses = [train_step(module, optimizer, data.batch(step * accumulate + i)) for i in range(accumulate)]
        yield float(np.mean(jax.device_get(losses)))


def finetune(model: Llama, params: Any, data: PackedDocuments, mesh: Mesh, args: argparse.Namespace) -> list[float]:
    """Train up to step `--steps`, from the last saved state if there is one; save states, plot and checkpoint."""
    module = make_module(model, params, mesh, args)
    optimizer = make_training(module, mesh, args)
    with TrainingStates(args.out.with_name(args.out.name + ".training"), settings(args, data)) as states:
        losses = states.restore(module, optimizer)
        steps = range(len(losses), args.steps)
        with tqdm(total=args.steps, initial=steps.start, unit="step") as bar:
            for step, loss in zip(steps, train(module, optimizer, data, steps, args.accumulate), strict=True):
                losses.append(loss)
                bar.update()
                bar.set_postfix(loss=f"{loss:.4f}", tokens=f"{(step + 1) * args.accumulate * args.length:,}")
                if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                    states.save(module, optimizer, losses)
    save_checkpoint(args.out, *from_nnx(module))
    save_tokenizer(args.model, args.out)
    if plotting.can_draw():
        plot(args.out / "loss.svg", "step", "loss, nats a token", {"": (range(1, len(losses) + 1), losses)})
    return losses


def settings(args: argparse.Namespace, data: PackedDocuments) -> dict[str, Any]:
    """What two parts of one training must have in common: by contents, where a path may hold something else by now."""
    alike = ["length", "max_positions", "steps", "accumulate"]
    alike += ["learning_rate", "warmup", "weight_decay", "clip"]
    return {name: str(getattr(args, name)) for name in alike} | {
        "model": " ".join(checkpoint_fingerprint(args.model).values()),
        "data": data.digest(),
    }


def save_tokenizer(source: Path, out: Path) -> None:
    """Put the tokenizer of a checkpoint beside the trained weights, for transformers and `load_tokenizer`."""
    if source.is_dir():
        for pattern in ("*token*.json", "vocab.json", "merges.txt", "chat_template.*", "generation_config.json"):
            for path in source.glob(pattern):
                shutil.copyfile(path, out / path.name)
    else:
        from longctx.models.gguf_tokenizer import read_gguf_tokenizer

        tokenizer, _, special_tokens, template = read_gguf_tokenizer(source)
        tokenizer.save(str(out / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens}
        (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        if template is not None:
            (out / "chat_template.jinja").write_text(template.text)


def compare(model: Llama, params: Any, data: PackedDocuments, mesh: Mesh, args: argparse.Namespace) -> float:
    """Take the same steps in the ring and on one device, print both losses, and return their largest difference."""
    curves = []
    for of in (mesh, None):
        module = make_module(model, jax.tree.map(jnp.copy, params), of, args)  # a step donates its parameters
        optimizer = make_training(module, of, args)
        losses = train(module, optimizer, data, range(args.compare), args.accumulate)
        curves.append(list(tqdm(losses, total=args.compare, unit="step")))
        del module, optimizer
    print(f"step  {args.devices} devices  1 device")
    for step, (ring, dense) in enumerate(zip(*curves, strict=True)):
        print(f"{step:4}  {ring:9.6f}  {dense:8.6f}")
    difference = np.abs(np.subtract(*curves)).max().item()
    print(f"largest difference: {difference:.1e}")
    return difference


def temp_bytes(module: nnx.Module, optimizer: nnx.Optimizer, length: int) -> int:
    """Bytes of one device that a step takes beside parameters and optimizer, for sequences of `length` tokens."""
    batch = Batch(*[jax.ShapeDtypeStruct((length,), jnp.int32)] * 4)
    return train_step.lower(module, optimizer, batch).compile().memory_analysis().temp_size_in_bytes


def measure_memory(model: Llama, params: Any, args: argparse.Namespace) -> None:
    """Print the temporary memory of a step for each length, over one device and more, and plot it."""
    sizes = sorted({2**i for i in range(args.devices.bit_length())} | {args.devices})
    table = {}
    for size in sizes:
        mesh = make_mesh(context=size)
        module = make_module(model, jax.tree.map(jnp.copy, params), mesh, args)
        optimizer = make_training(module, mesh, args)
        table[size] = [temp_bytes(module, optimizer, length) / 2**20 for length in args.memory]
    print("MiB of each device, temporary, in one training step\n")
    print("| tokens |" + "".join(f" N = {size} |" for size in sizes))
    print("| --- |" + " --- |" * len(sizes))
    for length, *row in zip(args.memory, *table.values(), strict=True):
        print(f"| {length:,} |" + "".join(f" {mib:,.0f} |" for mib in row))
    if plotting.can_draw() and args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        curves = {f"N = {size}": (args.memory, mib) for size, mib in table.items()}
        plot(args.out / "memory.svg", "tokens", "MiB of each device", curves)


def plot(path: Path, x_label: str, y_label: str, curves: dict[str, tuple[Any, Any]]) -> None:
    """Draw curves of names and (x, y)."""
    with plotting.style():
        figure, (axes,) = plotting.drawing()
        for (name, xy), marker in zip(curves.items(), plotting.MARKERS, strict=False):
            axes.plot(*xy, label=name, marker=marker if len(xy[0]) < 20 else None)
        axes.set(xlabel=x_label, ylabel=y_label)
        if len(curves) > 1:
            axes.legend()
        plotting.save(figure, path)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)

    def at_least(kind: Callable[[str], Any], least: float) -> Callable[[str], Any]:
        def convert(text: str) -> Any:
            value = kind(text)
            if not value >= least:
                raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
            return value

        convert.__name__ = kind.__name__  # argparse says "invalid int value"
        return convert

    positive, several, real = at_least(int, 1), at_least(int, 2), at_least(float, 0)
    add = parser.add_argument
    add("--model", type=Path, default=TINY, help="checkpoint directory or GGUF file (default: the built-in one)")
    add("--data", type=Path, help="a text file, or a directory of text files (default: Python's standard library)")
    add("--out", type=Path, help="directory of the trained checkpoint; states of the training are in OUT.training")
    add("--devices", type=positive, default=8, help="devices in the ring (default: %(default)s)")
    add("--length", type=several, default=8192, help="tokens of a sequence (default: %(default)s)")
    add("--max-positions", type=several, help="longer documents are cut (default: the model's own)")
    add("--steps", type=positive, default=30, help="(default: %(default)s)")
    add("--accumulate", type=positive, default=1, help="sequences of a step (default: %(default)s)")
    add("--learning-rate", type=real, default=1e-4, help="the highest (default: %(default)s)")
    add("--warmup", type=at_least(int, 0), default=5, help="steps until then (default: %(default)s)")
    add("--weight-decay", type=real, default=0.01, help="(default: %(default)s)")
    add("--clip", type=at_least(float, 1e-6), default=1.0, help="norm of the gradient (default: %(default)s)")
    add(
        "--method",
        choices=("pass_kv", "pass_q", "all_gather", "ulysses"),
        default="pass_kv",
        help="(default: %(default)s)",
    )
    add("--chunk", type=positive, default=512, help="tokens of a device in the feed-forward (default: %(default)s)")
    add("--save-every", type=positive, default=10, help="steps between states (default: %(default)s)")
    add("--compare", type=positive, metavar="STEPS", help="train in the ring and on one device, and save nothing")
    add("--memory", type=positive, nargs="+", metavar="TOKENS", help="measure the memory of a step, and save nothing")
    args = parser.parse_args()
    if args.out is None and not (args.compare or args.memory):
        parser.error("--out is needed to train")
    if args.out is not None:
        args.out = args.out.absolute()
        if not args.out.name or args.out.name == "..":
            parser.error(f"--out must name a directory, got {args.out}")
        if args.out.exists() and not args.out.is_dir():
            parser.error(f"--out must be a directory, got the file {args.out}")
        if args.out.resolve() == args.model.resolve():
            parser.error(f"--out must be another directory than --model, {args.model}")
    if args.warmup >= args.steps:
        parser.error(f"--warmup must be less than --steps, {args.steps}, got {args.warmup}")
    return args


def main() -> None:
    args = parse_args()
    # This has to come before JAX creates its devices, and has an effect on CPUs only.
    if jax.config.jax_num_cpu_devices < args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)
    try:
        model, params = load_checkpoint(args.model, dtype=jnp.float32)
        if args.max_positions is not None:
            model = Llama(dataclasses.replace(model.config, max_positions=args.max_positions))
        if args.memory:
            return measure_memory(model, params, args)
        documents = encode_documents(read_documents(args.data), load_tokenizer(args.model))
        data = PackedDocuments(documents, args.length, longest=model.config.max_positions)
        mesh = make_mesh(context=args.devices)
        if args.compare:
            if compare(model, params, data, mesh, args) > TOLERANCE:
                raise SystemExit(f"the losses differ by more than {TOLERANCE}")
        else:
            finetune(model, params, data, mesh, args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
