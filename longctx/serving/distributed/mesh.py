"""The mesh over many hosts: `tensor` stays inside a host, `context` and then `stage` span hosts."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from longctx.parallel.topology import AXES
from longctx.serving.distributed.process_group import ProcessGroup


def make_process_mesh(group: ProcessGroup, stage: int = 1, context: int = 1, tensor: int = 1) -> Mesh:
    """Make a mesh of all devices of all processes, ordered by host, so that `tensor`, the fastest axis, stays inside.

    Args:
      group: several of its processes may be on one host; hosts are identified by name.
      stage, context, tensor: sizes of the mesh.

    Returns:
      A mesh with axes `stage`, `context` and `tensor`, all of them Auto.

    Raises:
      ValueError: the sizes do not multiply to the number of devices, or `tensor` would span two hosts.

    Source:
      Mnemosyne, 4.5 (the three axes).

    Examples:
      >>> import jax
      >>> from longctx.serving.distributed import initialize, make_process_mesh
      >>> group = initialize("127.0.0.1:9876", num_processes=1, process_id=0)
      >>> mesh = make_process_mesh(group, context=jax.device_count())
      >>> mesh.axis_names, mesh.size == jax.device_count()
      (('stage', 'context', 'tensor'), True)
    """
    return arrange_devices(jax.devices(), group.host_names, stage, context, tensor)


def arrange_devices(
    devices: Sequence[jax.Device], host_names: Sequence[str], stage: int, context: int, tensor: int
) -> Mesh:
    """Arrange given devices like `make_process_mesh`; `host_names` are the hosts of their processes."""
    # `mesh_utils.create_hybrid_device_mesh` supports hosts with one process only.
    first_process = {name: process for process, name in reversed([*enumerate(host_names)])}

    def host_order(device: jax.Device) -> tuple[int, int, int]:
        return first_process[host_names[device.process_index]], device.process_index, device.id

    shape, count = (stage, context, tensor), stage * context * tensor
    if count != len(devices):
        raise ValueError(
            f"plan needs stage * context * tensor = {stage} * {context} * {tensor} = {count} devices, and the "
            f"{len(host_names)} processes have {len(devices)}: a mesh over processes takes all"
        )
    ordered = np.array(sorted(devices, key=host_order)).reshape(shape)
    for group in ordered.reshape(-1, tensor):
        hosts = sorted({host_names[device.process_index] for device in group})
        if len(hosts) > 1:
            each = sum(host_names[device.process_index] == hosts[0] for device in devices)
            raise ValueError(
                f"plan's tensor must divide the {each} devices of a host, got {tensor}, which would be on "
                f"{' and '.join(hosts)}: only stage and context may span hosts"
            )
    return Mesh(ordered, AXES, axis_types=(AxisType.Auto,) * 3)


def describe_mesh(mesh: Mesh, group: ProcessGroup) -> str:
    """A table of the devices and their coordinates in the mesh, a line for each.

    Args:
      mesh: as from `make_process_mesh`.
      group: the processes that its devices are of.

    Returns:
      Text, with a head.

    Examples:
      >>> import jax
      >>> from longctx.serving.distributed import describe_mesh, initialize, make_process_mesh
      >>> group = initialize("127.0.0.1:9876", num_processes=1, process_id=0)
      >>> table = describe_mesh(make_process_mesh(group, context=jax.device_count()), group)
      >>> table.splitlines()[0].split(), len(table.splitlines()) == 1 + jax.device_count()
      (['stage', 'context', 'tensor', 'device'], True)
    """
    lines = ["stage  context  tensor  device"]
    for (stage, context, tensor), device in np.ndenumerate(mesh.devices):
        host = group.host_names[device.process_index]
        name = f"{device.device_kind} {device.id} of process {device.process_index} on {host}"
        lines.append(f"{stage:>5}  {context:>7}  {tensor:>6}  {name}")
    return "\n".join(lines)
