"""Topologies: a device and the link of each mesh axis, from which costs are predicted."""

import dataclasses
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longctx.annotations import Real
from longctx.parallel.cost import Hardware
from longctx.parallel.device_tables import DEVICES, FOUND, LINKS, PRESETS, Device, Link

AXES = ("stage", "context", "tensor")


@dataclasses.dataclass(frozen=True)
class Topology:
    """A device, and the link of each mesh axis over which there are several devices.

    Presets: `h100-nvlink`, `h200-nvlink`, `a100-nvlink`: one host. `h100-rdma`, `h200-rdma`, `h100-tcp`: `tensor`
    within hosts, `context` and `stage` across them, over RDMA of 400 Gb/s a GPU, or TCP. `mnemosyne-h100`: Mnemosyne's
    and Medha's hosts, `h100-rdma` with attention kernels of their time. `meta-gtt`, `meta-gti`: Meta's two clusters.
    `medha-a100`: Medha's two DGX-A100. `a100-800g`: Mooncake's hosts, of 8 A800 and 800 Gb/s. `cpu`: devices made of
    one machine's cores.

    Attributes:
      device: the accelerator.
      links: by axis, `"tensor"`, `"context"` and `"stage"`.
      name: of the preset, or what it is called.

    Raises:
      TypeError, ValueError: device is no `Device`, a link no `Link`, the name no string, or an axis does not exist.

    Source:
      Mnemosyne, 5; Medha, 5.1; context parallelism paper, 4.1; Mooncake, 7: the hosts of the presets.

    Examples:
      >>> from longctx.parallel import ModelShape, Topology, choose_ring
      >>> topology = Topology.preset("h100-rdma")
      >>> topology.link("tensor").name, topology.link("context").name
      ('nvlink-h100', 'rdma-400g')
      >>> choose_ring(100_000, 0, 4, ModelShape(4, 1, 128), topology).method
      'pass_kv'
      >>> own = Topology.from_dict({"device": "H100", "links": {"context": {"bandwidth": 25e9, "latency": 2e-5}}})
      >>> own.check(context=4, tensor=8)
      Traceback (most recent call last):
          ...
      ValueError: topology must have a link for the axis tensor, it has context
    """

    device: Device
    links: Mapping[str, Link] = dataclasses.field(hash=False)
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.device, Device):
            raise TypeError(f"device must be a Device, got {self.device!r}")
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a string, got {self.name!r}")
        if not isinstance(self.links, Mapping):
            raise TypeError(f"links must be a mapping from axes to links, got {self.links!r}")
        for axis, link in self.links.items():
            if axis not in AXES:
                raise ValueError(f"links must be of the axes {', '.join(AXES)}, got {axis!r}")
            if not isinstance(link, Link):
                raise TypeError(f"links must have a Link for {axis}, got {link!r}")
        object.__setattr__(self, "links", dict(self.links))

    @classmethod
    def preset(cls, name: str) -> "Topology":
        """A topology by its name, one of the presets.

        Raises:
          TypeError: it is no string.
          ValueError: there is none of that name.
        """
        if not isinstance(name, str):
            raise TypeError(f"topology must be the name of a preset or a file, a string, got {name!r}")
        if name not in PRESETS:
            raise ValueError(f"topology must be one of {', '.join(PRESETS)}, or a file, got {name!r}")
        device, tensor, context, stage = PRESETS[name]
        links = {"tensor": LINKS[tensor], "context": LINKS[context], "stage": LINKS[stage]}
        return cls(DEVICES[device], links, name)

    @classmethod
    def named(cls, text: str) -> "Topology":
        """The preset of a name, or what a file says, as `--topology` takes either.

        Raises:
          OSError: the file can't be read.
          ValueError: there is neither such a preset nor such a file, or the file is no topology.
        """
        is_file = isinstance(text, str) and text not in PRESETS and Path(text).is_file()
        return cls.from_file(Path(text)) if is_file else cls.preset(text)

    @classmethod
    def from_file(cls, path: Path) -> "Topology":
        """Read a topology: JSON of `device` and `links`, with the attributes of `Device` and `Link` or names of ours.

        For example `{"device": "H100", "links": {"tensor": "nvlink-h100", "context": {"bandwidth": 25e9, "latency":
        2e-5}}}`.

        Returns:
          The topology, whose attributes that the file lacks are the defaults.

        Raises:
          OSError: the file can't be read.
          ValueError: it is no topology; the message says why.
        """
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is no topology: {error}") from None

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Topology":
        """A topology from plain data, as in a file.

        Raises:
          TypeError, ValueError: the message says what is wrong with it.
        """
        if not isinstance(fields, Mapping) or not {"device", "links"} <= {*fields} <= {"device", "links", "name"}:
            raise ValueError("it must have device and links, and may have a name, and nothing else")
        if not isinstance(fields["links"], Mapping):
            raise ValueError(f"links must be a mapping from axes to links, got {fields['links']!r}")
        links = {axis: _made(Link, LINKS, f"link of {axis}", link) for axis, link in fields["links"].items()}
        return cls(_made(Device, DEVICES, "device", fields["device"]), links, fields.get("name", ""))

    def to_dict(self) -> dict[str, Any]:
        """The topology as plain data, from which `from_dict` makes the same."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def link(self, axis: str) -> Link:
        """The link of an axis.

        Raises:
          ValueError: there is none.
        """
        if axis not in self.links:
            raise ValueError(f"topology must have a link for the axis {axis}, it has {', '.join(self.links) or 'none'}")
        return self.links[axis]

    def check(self, **sizes: int) -> None:
        """Check that there is a link for each axis of several devices.

        Args:
          **sizes: devices of each axis, such as `context=4`.

        Raises:
          ValueError: there is none; the message names the axis.
        """
        for axis, size in sizes.items():
            if size > 1:
                self.link(axis)

    def hardware(self, axis: str, element_bytes: Real = 2, partial_bytes: Real = 4) -> Hardware:
        """The device as attention reaches it, and its link along an axis, as `choose_ring` and `predict_times` take it.

        Args:
          axis: `"tensor"`, `"context"` or `"stage"`.
          element_bytes: of queries, keys and values.
          partial_bytes: of partial results.

        Raises:
          ValueError: there is no link for the axis.
        """
        link, device = self.link(axis), self.device
        return Hardware(
            device.reached_attention(element_bytes),
            link.bandwidth * link.share,
            element_bytes,
            link.latency,
            device.reached_key_bandwidth,
            partial_bytes,
            link.bandwidth * (link.share if link.collective_share is None else link.collective_share),
            link.latency if link.collective_latency is None else link.collective_latency,
            device.contention,
            name=f"{device.name}, {link.name}",
        )


def _made(kind: type, known: Mapping[str, Any], name: str, value: Any) -> Any:
    """A `Device` or `Link` from its name or its attributes."""
    if isinstance(value, str):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, or its attributes, got {value!r}")
        return known[value]
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a name or a mapping of attributes, got {value!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := {*value} - {*fields}:
        raise ValueError(f"{name} has no attribute {min(map(str, unknown))}; it has {', '.join(fields)}")
    needed = {field for field, about in fields.items() if about.default is dataclasses.MISSING} - {"name"}
    if missing := needed - {*value}:
        raise ValueError(f"{name} must have {min(missing)}")
    try:
        return kind(**{"name": "given"} | dict(value))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def find_topology(mesh: Any) -> Topology:
    """The topology of a mesh, from its devices' kind and from the hosts that they are in.

    An axis whose neighbours are all in one host has that host's link, NVLink; else it has the network's. None, and
    anything that is no accelerator, counts as a CPU. An accelerator that is not in the tables counts as an H100, which
    its device's name says, and a warning.

    Args:
      mesh: a `jax.sharding.Mesh` of the axes stage, context and tensor, or some of them.

    Returns:
      The topology, with a link for each axis.

    Examples:
      >>> from longctx.parallel import find_topology, make_mesh
      >>> find_topology(make_mesh()).device.name
      'cpu'
    """
    device, within, across = _found(None if mesh is None else mesh.devices.flat[0])
    links = {axis: LINKS[within if is_in_one_host(mesh, axis) else across] for axis in AXES}
    return Topology(device, links, "found")


def hardware_of(device: Any, in_one_host: bool) -> Hardware:
    """A `jax.Device` and its link to others, within its host or across hosts, as `find_topology` finds them."""
    found, within, across = _found(device)
    return Topology(found, {"context": LINKS[within if in_one_host else across]}, "found").hardware("context")


def _found(device: Any) -> tuple[Device, str, str]:
    """Return what is known of a `jax.Device`, and the links within and across hosts."""
    name = device_name(device)
    known = DEVICES["A100" if name == "A800" else name or _DEFAULT]
    if name is None:
        kind = device.device_kind
        warnings.warn(
            f"no figures of the device {kind!r} are known: costs are predicted as for an {_DEFAULT}; give a Topology "
            "that has them",
            stacklevel=3,
        )
        known = dataclasses.replace(known, name=f"{_DEFAULT}, assumed for {kind}")
    return known, *FOUND[name or _DEFAULT]


def is_in_one_host(mesh: Any, axis: str) -> bool:
    """Whether all devices that exchange over an axis are in one host, line by line."""
    if mesh is None or axis not in mesh.axis_names:
        return True
    at, devices = mesh.axis_names.index(axis), mesh.devices
    lines = devices.swapaxes(at, -1).reshape(-1, devices.shape[at])
    return all(len({_host(device) for device in line}) == 1 for line in lines)


_DEFAULT = "H100"


def device_name(device: Any) -> str | None:
    """The name of a `jax.Device` in the tables; None if it is an accelerator that isn't there."""
    if device is None or device.platform == "cpu":
        return "cpu"
    words = re.split(r"[^0-9A-Za-z]+", device.device_kind)  # whole ones: a GH200 is no H200
    return next((name for name in FOUND if name in words), None)


def _host(device: Any) -> int:
    """The host of a device. GPUs say which; of others it is known which process they belong to."""
    return int(getattr(device, "slice_index", device.process_index))
