"""The mesh over hosts: `tensor` stays inside one, `context` and then `stage` go across."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from longctx.parallel.mesh import AXES
from longctx.serving.distributed.process_group import ProcessGroup


def make_process_mesh(group: ProcessGroup, stage: int = 1, context: int = 1, tensor: int = 1) -> Mesh:
    """All devices of all processes, in the order of hosts, so that `tensor`, which runs fastest, stays inside one.

    Args:
      group: may be several processes on one host; a host is known by its name.

    Raises:
      ValueError: the sizes are not those of all devices, or a group of `tensor` would be on two hosts.
    """
    return arrange_devices(jax.devices(), group.names, stage, context, tensor)


def arrange_devices(devices: Sequence[jax.Device], names: Sequence[str], stage: int, context: int, tensor: int) -> Mesh:
    """`make_process_mesh` of given devices; `names` are the hosts of their processes."""
    # (`mesh_utils.create_hybrid_device_mesh` does the same where every host has one process, and no other.)
    first = {name: process for process, name in reversed([*enumerate(names)])}

    def place(device: jax.Device) -> tuple[int, int, int]:
        return first[names[device.process_index]], device.process_index, device.id

    shape, count = (stage, context, tensor), stage * context * tensor
    if count != len(devices):
        raise ValueError(
            f"plan needs stage * context * tensor = {stage} * {context} * {tensor} = {count} devices, and the "
            f"{len(names)} processes have {len(devices)}: a mesh over processes takes all"
        )
    ordered = np.array(sorted(devices, key=place)).reshape(shape)
    for group in ordered.reshape(-1, tensor):
        on = sorted({names[device.process_index] for device in group})
        if len(on) > 1:
            each = sum(names[device.process_index] == on[0] for device in devices)
            raise ValueError(
                f"plan's tensor must divide the {each} devices of a host, got {tensor}, which would be on "
                f"{' and '.join(on)}: stages, and context, go across hosts"
            )
    return Mesh(ordered, AXES, axis_types=(AxisType.Auto,) * 3)


def describe_mesh(mesh: Mesh, group: ProcessGroup) -> str:
    """Which device has which part, a line for each."""
    lines = ["stage  context  tensor  device"]
    for (stage, context, tensor), device in np.ndenumerate(mesh.devices):
        where = (
            f"{device.device_kind} {device.id} of process {device.process_index} on {group.names[device.process_index]}"
        )
        lines.append(f"{stage:>5}  {context:>7}  {tensor:>6}  {where}")
    return "\n".join(lines)
