"""Topologies: what is found from devices and hosts, presets, files, and what is refused."""

import dataclasses
import json
import pickle
import tempfile
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.models import LlamaConfig
from longctx.parallel import Device, Link, Topology, choose_ring, find_topology, make_mesh
from longctx.parallel.cost import LLAMA3_405B, Hardware
from longctx.parallel.device_tables import DEVICES, LINKS, PRESETS
from longctx.parallel.topology import AXES, device_name

GPU = LLAMA3_405B.split(8)
MODEL = LlamaConfig.preset("llama-3.1-8b")


def mesh_of(kind: str, hosts: np.ndarray, names: tuple[str, ...] = ("stage", "context", "tensor"), **more: Any) -> Any:
    """A mesh of fake devices, whose process has the number of their host."""
    devices = np.empty(hosts.shape, object)
    for at, host in np.ndenumerate(hosts):
        devices[at] = SimpleNamespace(platform="gpu", device_kind=kind, process_index=int(host), **more)
    return SimpleNamespace(devices=devices, axis_names=names)


def test_links_are_found_from_hosts() -> None:
    """Stage 2, context 2, tensor 4 on two hosts of 8: only stages are in different hosts."""
    hosts = np.arange(16).reshape(2, 2, 4) // 8
    found = find_topology(mesh_of("NVIDIA H100 80GB HBM3", hosts))
    assert found.device == DEVICES["H100"]
    assert [found.link(axis).name for axis in ("tensor", "context", "stage")] == [
        "nvlink-h100",
        "nvlink-h100",
        "rdma-400g",
    ]
    across = find_topology(mesh_of("NVIDIA A100-SXM4-80GB", np.arange(16).reshape(1, 4, 4) // 4))
    assert across.device == DEVICES["A100"]
    assert (across.link("tensor").name, across.link("context").name) == ("nvlink-a100", "rdma-200g")
    # One device that is elsewhere is enough for the network's link.
    hosts = np.zeros((1, 2, 4), int)
    hosts[0, 1, 3] = 1
    assert find_topology(mesh_of("H200", hosts)).link("tensor").name == "rdma-400g"


def test_processes_of_one_host_are_found_where_devices_tell() -> None:
    """One process for each GPU, all in one host."""
    mesh = mesh_of("NVIDIA H100 80GB HBM3", np.arange(8).reshape(1, 2, 4), slice_index=0)
    assert find_topology(mesh).link("context").name == "nvlink-h100"


def test_cpus_and_unknown_devices() -> None:
    assert find_topology(None) == find_topology(make_mesh(context=2))
    assert find_topology(None).device.name == "cpu"
    # A GH200's memory and links are not an H200's.
    for kind in ("NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA A1000"):
        assert device_name(SimpleNamespace(platform="gpu", device_kind=kind)) is None
        with pytest.warns(UserWarning, match=rf"no figures of the device '{kind}' are known.*as for an H100"):
            found = find_topology(mesh_of(kind, np.zeros((1, 1, 2), int)))
        assert found.device == dataclasses.replace(DEVICES["H100"], name=f"H100, assumed for {kind}")
        choice = choose_ring(10, 20, 2, GPU, found)
        assert choice.explain().splitlines()[1].startswith(f"hardware: H100, assumed for {kind}, nvlink-h100: ")
    known = {
        "NVIDIA H200": "H200",
        "NVIDIA H100 PCIe": "H100",
        "A100-SXM4-40GB": "A100",
        "NVIDIA A800 80GB PCIe": "A800",
    }
    for kind, name in known.items():
        assert device_name(SimpleNamespace(platform="gpu", device_kind=kind)) == name
    assert find_topology(mesh_of("H100", np.zeros((2,), int), ("context",))).link("stage").name == "nvlink-h100"


@pytest.mark.parametrize("name", [*PRESETS])
def test_presets_have_all_axes_and_go_through_files(name: str, tmp_path: Path) -> None:
    topology = Topology.preset(name)
    assert topology.name == name
    topology.check(tensor=8, context=4, stage=4)
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(topology.to_dict()))
    assert Topology.from_file(path) == Topology.named(str(path)) == topology == Topology.named(name)
    for axis in ("tensor", "context", "stage"):
        hardware = topology.hardware(axis)
        assert hardware.peak_flops < topology.device.flops["bfloat16"]
        assert hardware.bandwidth <= topology.link(axis).bandwidth
        assert (
            choose_ring(4096, 4096, 4, GPU, topology).times
            == choose_ring(4096, 4096, 4, GPU, topology.hardware("context")).times
        )


def test_a_topology_has_mappings_of_its_own() -> None:
    """What it was made from may change, or be of any kind."""
    flops, links = {"bfloat16": 1e12}, {"context": LINKS["rdma-400g"]}
    device = Device("mine", MappingProxyType(flops), 1e12)
    topology = Topology(device, MappingProxyType(links))
    plain = topology.to_dict()
    links["tensor"] = LINKS["nvlink-h100"]
    flops["float8"] = 2e12
    assert topology.to_dict() == plain
    assert json.loads(json.dumps(plain)) == plain
    same = Topology.from_dict(plain)
    assert same == topology == pickle.loads(pickle.dumps(topology))
    assert len({topology, same, Topology.preset("h100-rdma")}) == 2
    assert hash(device) == hash(same.device)


def test_a_file_may_use_names_and_numbers(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"device": "H100", "links": {"tensor": "nvlink-h100", "context": {"bandwidth": 25e9}}}')
    topology = Topology.from_file(path)
    assert topology.link("context") == Link("given", 25e9)
    assert topology.device is DEVICES["H100"]
    with pytest.raises(ValueError, match="topology must have a link for the axis stage, it has tensor, context"):
        topology.check(tensor=8, context=2, stage=2)
    topology.check(tensor=8, context=2, stage=1)


def test_hardware_is_what_is_reached() -> None:
    gtt = Topology.preset("meta-gtt").hardware("context", partial_bytes=2)
    assert gtt.peak_flops == pytest.approx(502e12)
    assert gtt.bandwidth == pytest.approx(26.5e9)
    gti = Topology.preset("meta-gti").hardware("context")
    assert gti.bandwidth == pytest.approx(3e9)
    h100 = DEVICES["H100"]
    assert h100.reached_flops(1) == pytest.approx(2 * h100.reached_flops(2), rel=0.01)
    assert DEVICES["A100"].reached_flops(1) == DEVICES["A100"].reached_flops(2)  # it has no FP8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no topology: Expecting"),
        ("[]", "must have device and links"),
        ('{"device": "H100"}', "must have device and links"),
        ('{"device": "H100", "links": [], "x": 1}', "and nothing else"),
        ('{"device": "H100", "links": []}', r"links must be a mapping from axes to links, got \[\]"),
        ('{"device": "H99", "links": {}}', "device must be one of H200, H100, .* got 'H99'"),
        ('{"device": 3, "links": {}}', "device must be a name or a mapping of attributes, got 3"),
        ('{"device": {"flops": {"bfloat16": 1}}, "links": {}}', "device must have memory_bandwidth"),
        ('{"device": {"flops": {"float8": 1}, "memory_bandwidth": 1}, "links": {}}', "device: flops must .* bfloat16"),
        ('{"device": "H100", "links": {"data": "tcp-100g"}}', "links must be of the axes stage, context, tensor, got"),
        ('{"device": "H100", "links": {"tensor": "wifi"}}', "link of tensor must be one of nvlink-h100, .* got 'wifi'"),
        ('{"device": "H100", "links": {"tensor": {"latency": 1}}}', "link of tensor must have bandwidth"),
        ('{"device": "H100", "links": {"tensor": {"bandwidth": 1, "speed": 1}}}', "no attribute speed; it has"),
        (
            '{"device": "H100", "links": {"tensor": {"bandwidth": 1, "latency": -1}}}',
            "link of tensor: latency must be a finite number that is not negative, got -1",
        ),
        ('{"device": "H100", "links": {"tensor": {"bandwidth": 0}}}', "bandwidth must be a positive, finite number"),
        ('{"device": "H100", "links": {"tensor": {"bandwidth": "1"}}}', "bandwidth must be .*, got '1'"),
        ('{"device": "H100", "links": {"tensor": {"bandwidth": 1, "share": 1.5}}}', "share must be .* at most 1, got"),
        (
            '{"device": "H100", "links": {"context": {"bandwidth": 1' + "0" * 400 + "}}}",
            "link of context: bandwidth must be a positive, finite number, got 1000",
        ),
        (
            '{"device": {"flops": {"bfloat16": 1e12, "fp8": 2e12}, "memory_bandwidth": 1}, "links": {}}',
            "device: flops must be of the dtypes float8, bfloat16, .* got 'fp8'",
        ),
        (
            '{"device": {"name": [1], "flops": {"bfloat16": 1e12}, "memory_bandwidth": 1}, "links": {}}',
            r"device: name must be a string, got \[1\]",
        ),
        (
            '{"device": "H100", "links": {"context": {"name": 3, "bandwidth": 1}}}',
            "link of context: name must be a str",
        ),
        ('{"device": "H100", "links": {}, "name": []}', r"name must be a string, got \[\]"),
    ],
)
def test_broken_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as refused:
        Topology.from_file(path)
    assert str(path) in str(refused.value)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"topology must be one of h100-nvlink, .*, or a file, got 'h100'"):
        Topology.named("h100")
    for get in (Topology.preset, Topology.named):
        with pytest.raises(TypeError, match=r"topology must be the name of .*, got \['a'\]"):
            get(["a"])  # type: ignore[arg-type]
    for bandwidth in (10**400, True):
        with pytest.raises(ValueError, match="bandwidth must be a positive, finite number"):
            Hardware(1e12, bandwidth)
    with pytest.raises(TypeError, match="device must be a Device, got 'H100'"):
        Topology("H100", {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="links must have a Link for tensor, got 3"):
        Topology(DEVICES["H100"], {"tensor": 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="links must be a mapping"):
        Topology(DEVICES["H100"], [LINKS["tcp-100g"]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="latency must be a finite number that is not negative, got -1e-06"):
        Link("mine", 1e9, latency=-1e-6)
    with pytest.raises(ValueError, match="collective_share must be a positive, finite number, at most 1, got nan"):
        Link("mine", 1e9, collective_share=float("nan"))
    with pytest.raises(ValueError, match="contention must be"):
        Device("mine", {"bfloat16": 1e12}, 1e12, contention=-0.1)
    with pytest.raises(ValueError, match="flops of bfloat16 must be a positive, finite number, got 0"):
        Device("mine", {"bfloat16": 0}, 1e12)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.sampled_from(["H100", "tcp-100g", "tensor", ""]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["device", "links", "tensor", "bandwidth", "flops", "bfloat16"]), inner)
    ),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries({"device": JSON | st.just("H100"), "links": st.dictionaries(st.sampled_from(AXES), JSON)})
    | JSON
)
def test_any_file_is_read_or_refused_by_its_name(contents: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "topology.json"
        path.write_text(json.dumps(contents))
        try:
            topology = Topology.from_file(path)
        except ValueError as error:
            refused = str(error)
        else:
            refused = f"{path} is no topology: no"
            assert Topology.from_dict(topology.to_dict()) == topology
    assert refused.startswith(f"{path} is no topology: ")


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_an_axis_has_the_hosts_link_if_no_two_of_its_devices_are_in_two_hosts(
    stage: int, context: int, tensor: int, per_host: int
) -> None:
    hosts = np.arange(stage * context * tensor).reshape(stage, context, tensor) // per_host
    found = find_topology(mesh_of("H100", hosts))
    for number, axis in enumerate(AXES):
        inside = (hosts.min(number) == hosts.max(number)).all()
        assert (found.link(axis).name == "nvlink-h100") == inside
