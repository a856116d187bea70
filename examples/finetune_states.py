"""States of a training on disk, by orbax: what `finetune_llama.py` goes on from after it was interrupted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx


class TrainingStates:
    """A directory with the last two states of one training: its arrays, losses and settings.

    A state is written beside the training and renamed at the end, so a process may be killed at any time. Arrays return
    to the devices that they were on.

    Raises:
      ValueError: the directory holds something else, or a training of other settings; the message names it.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self.directory, self.settings = directory.absolute(), dict(settings)
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory} is no directory")
        foreign = [path.name for path in directory.glob("*") if not path.name.split(".")[0].isdigit()]
        if foreign:
            raise ValueError(f"{directory} is no directory of training states: it holds {sorted(foreign)[0]}")
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = ocp.CheckpointManager(self.directory, options=options)

    def __enter__(self) -> "TrainingStates":
        return self

    def __exit__(self, *error: object) -> None:
        self.manager.close()  # waits for the state that is being written

    def save(self, module: nnx.Module, optimizer: nnx.Optimizer, losses: list[float]) -> None:
        """Begin to write the state after `len(losses)` steps; the arrays may be donated at once."""
        arrays = ocp.args.StandardSave(_arrays(module, optimizer))
        record = ocp.args.JsonSave({"settings": self.settings, "losses": losses})
        self.manager.save(len(losses), args=ocp.args.Composite(arrays=arrays, record=record))

    def restore(self, module: nnx.Module, optimizer: nnx.Optimizer) -> list[float]:
        """Set the arrays to those of the last state. Returns the losses up to it, none if there is no state."""
        step = self.manager.latest_step()
        if step is None:
            return []
        try:
            record = self._read(step, record=ocp.args.JsonRestore())["record"]
            losses, theirs = [float(loss) for loss in record["losses"]], dict(record["settings"])
        except Exception as error:  # orbax raises what its parts do
            raise ValueError(f"{self.directory / str(step)} is no state of this program: {error}") from error
        for name in self.settings.keys() | theirs.keys():
            if theirs.get(name) != self.settings.get(name):
                began = f"was begun with {name} {theirs.get(name)}, not {self.settings.get(name)}"
                raise ValueError(f"{self.directory} {began}: give the same, or remove the directory")
        arrays = _arrays(module, optimizer)
        try:
            wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays)
            arrays = self._read(step, arrays=ocp.args.StandardRestore(wanted))["arrays"]
        except Exception as error:
            raise ValueError(f"{self.directory / str(step)} cannot be read: {error}") from error
        for node, state in zip((module, optimizer), (arrays["module"], arrays["optimizer"]), strict=True):
            current = nnx.state(node)
            nnx.replace_by_pure_dict(current, state)
            nnx.update(node, current)
        return losses

    def _read(self, step: int, **items: Any) -> Any:
        return self.manager.restore(step, args=ocp.args.Composite(**items))


def _arrays(module: nnx.Module, optimizer: nnx.Optimizer) -> dict[str, Any]:
    return {"module": nnx.to_pure_dict(nnx.state(module)), "optimizer": nnx.to_pure_dict(nnx.state(optimizer))}
