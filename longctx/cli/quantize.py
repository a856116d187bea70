"""`longctx quantize`: write a checkpoint with FP8 weights."""

import argparse

from longctx.cli.terminal import Console, interrupts
from longctx.models import quantize_checkpoint, resolve_model
from longctx.serving.runner.device_memory import in_units


def run(options: argparse.Namespace) -> int:
    """Write the checkpoint, and print its size."""
    console = Console(options.quiet)
    model = resolve_model(options.model, options.quiet)
    with console.progress("quantising", "tensor", leave=False) as progress:
        interrupts.leave_to_python()  # so that what was begun is removed
        quantize_checkpoint(model, options.out, options.modules, progress)
    size = sum(path.stat().st_size for path in options.out.glob("*.safetensors"))
    console.note(f"{options.out}: {in_units(size)} of weights")
    return 0
