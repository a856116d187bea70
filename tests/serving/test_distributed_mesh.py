"""Placement of the mesh over hosts: `tensor` stays inside a host."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from longctx.serving.distributed.mesh import arrange_devices


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int


def devices(*processes: int) -> list[Any]:
    return [Device(i, process) for i, process in enumerate(processes)]


def hosts_of(mesh: Any, names: str) -> list[str]:
    return [
        "".join(names[device.process_index] for device in group)
        for group in mesh.devices.reshape(-1, mesh.shape["tensor"])
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_tensor_stays_inside_a_host(order: int) -> None:
    mesh = arrange_devices(devices(0, 0, 0, 0, 1, 1, 1, 1)[::order], "ab", 2, 2, 2)
    assert hosts_of(mesh, "ab") == ["aa", "aa", "bb", "bb"]  # context fits inside a host too
    assert np.vectorize(lambda device: device.id)(mesh.devices).reshape(-1).tolist() == list(range(8))
    assert hosts_of(arrange_devices(devices(0, 0, 1, 1), "ab", 1, 2, 2), "ab") == ["aa", "bb"]


def test_processes_of_a_host_are_adjacent() -> None:
    """Two hosts with two processes each, whose ids alternate; two devices a process."""
    mesh = arrange_devices(devices(0, 0, 1, 1, 2, 2, 3, 3), "abab", 2, 1, 4)
    assert hosts_of(mesh, "abab") == ["aaaa", "bbbb"]
    assert [device.process_index for device in mesh.devices.reshape(-1)] == [0, 0, 2, 2, 1, 1, 3, 3]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 8), "tensor must divide the 4 devices of a host, got 8, which would be on a and b"),
        ((2, 1, 2), r"stage \* context \* tensor = 2 \* 1 \* 2 = 4 devices, and the 2 processes have 8"),
        ((4, 4, 1), "16 devices, and the 2 processes have 8"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arrange_devices(devices(0, 0, 0, 0, 1, 1, 1, 1), "ab", *shape)
