"""The process that `ask_jax` starts: what JAX has here, and what longctx would pick and why, as a line of JSON."""

import json
import os
from typing import Any

from longctx.cli.doctor import Report, first_line
from longctx.cli.terminal import stdout_is_ours

_TOKENS = 131_072  # of the prompt that an exchange is chosen for
_HEADS, _KV_HEADS, _HEAD_SIZE = 32, 8, 128  # those of Llama-3 8B
_PAGE_SIZE = 64
_CHECK = "check JAX_PLATFORMS, the driver (nvidia-smi) and that jax, jaxlib and the plugin have one version"


def main() -> None:
    """Print a report as one line."""
    with stdout_is_ours():
        report = Report()
        with report.asking("JAX", "pip install --force-reinstall jax jaxlib"):
            import jax

            report.note("versions", "jax", jax.__version__)
            platforms = os.environ.get("JAX_PLATFORMS", "")
            asked = f"the devices of JAX_PLATFORMS={platforms}" if platforms else "JAX's devices"
            with report.asking(asked, _CHECK):
                _devices(report, jax.devices())
        print(json.dumps(report.to_dict()))


def _devices(report: Report, devices: list[Any]) -> None:
    for what, look in (
        ("the devices' kinds", _describe),
        ("the ptxas that assembles kernels", _ptxas),
        ("the host's memory", _memory),
        ("the links between devices", _links),
        ("what would be picked", _choices),
        ("XLA's flags", _xla_flags),
    ):
        with report.asking(what):
            look(report, devices)


def _describe(report: Report, devices: list[Any]) -> None:
    import jax

    platform = devices[0].client.platform_version
    report.note("versions", "platform", first_line(str(platform)) or "unknown")
    report.note("devices", "backend", jax.default_backend())
    for kind in sorted({device.device_kind for device in devices}):
        same = [device for device in devices if device.device_kind == kind]
        report.note("devices", kind, f"{len(same)}{_memory_of(same)}")
    if jax.process_count() > 1:
        report.note("devices", "processes", jax.process_count())


def _ptxas(report: Report, devices: list[Any]) -> None:
    from longctx.kernels.mosaic_gpu.ptxas import ptxas_in_use

    report.note("versions", "ptxas", ptxas_in_use())


def _memory_of(devices: list[Any]) -> str:
    """The memory that JAX may take of the smallest of some devices, if it is known."""
    statistics = [device.memory_stats() for device in devices if device.platform != "cpu"]
    limits = [each["bytes_limit"] for each in statistics if each and "bytes_limit" in each]
    return f", {min(limits) / 2**30:,.1f} GiB each for JAX" if limits else ""


def _memory(report: Report, devices: list[Any]) -> None:
    import jax

    from longctx.serving.engine.memory import available_bytes, in_units

    available = available_bytes(jax.local_devices(backend="cpu")[0])
    if available is not None:
        report.note("memory", "host", f"{in_units(available)} available")


def _links(report: Report, devices: list[Any]) -> None:
    from longctx.parallel import find_topology, make_mesh

    topology = find_topology(make_mesh(context=len(devices)) if len(devices) > 1 else None)
    report.note("links", "device", f"{topology.device.name}, as costs are predicted")
    for axis, link in topology.links.items():
        report.note("links", axis, f"{link.name}, {link.bandwidth / 1e9:,.0f} GB/s one way")


def _choices(report: Report, devices: list[Any]) -> None:
    import jax
    import jax.numpy as jnp

    from longctx.kernels import explain

    for paged in (False, True):
        name = "paged_attention" if paged else "attention"
        lead = (16, _PAGE_SIZE) if paged else (1024,)
        for dtype in (jnp.bfloat16, jnp.float32):
            q: Any = jax.ShapeDtypeStruct((1024, _HEADS, _HEAD_SIZE), dtype)
            k: Any = jax.ShapeDtypeStruct((*lead, _KV_HEADS, _HEAD_SIZE), dtype)
            found = explain(q, k, paged)
            reasons = [f"{other} {why}" for other, why in found.refused.items() if other != "reference"]
            report.note("picked", f"{name}, {jnp.dtype(dtype).name}", f"{found.taken}: {'; '.join(reasons)}")
            if found.ptxas and found.taken != "mosaic_gpu" and dtype == jnp.bfloat16:
                remedy = "docs/mosaic_gpu.md says which ptxas it takes"
                report.hint(f"{name} does without the kernels for this GPU: {found.refused['mosaic_gpu']}", remedy)
    _exchange(report, len(devices))


def _exchange(report: Report, num_devices: int) -> None:
    """Report what `choose_ring` answers for a long prompt, and for a token after it."""
    if num_devices == 1:
        report.note("picked", "exchange", "none: there is one device")
        return
    from longctx.parallel import choose_ring, find_topology, make_mesh
    from longctx.parallel.cost import ModelShape

    topology, model = find_topology(make_mesh(context=num_devices)), ModelShape(_HEADS, _KV_HEADS, _HEAD_SIZE)
    for name, new, cached in (("exchange, prefill", _TOKENS, 0), ("exchange, decode", 1, _TOKENS)):
        choice = choose_ring(new, cached, num_devices, model, topology)
        times = ", ".join(f"{method} {1e6 * each.total:,.0f}" for method, each in choice.times.items())
        report.note("picked", name, f"{choice.method} over {num_devices}; predicted us of a layer: {times}")


def _xla_flags(report: Report, devices: list[Any]) -> None:
    flags = os.environ.get("XLA_FLAGS", "").strip()
    report.note("picked", "XLA_FLAGS", flags or "none")
    if devices[0].platform in ("gpu", "cuda") and "xla_gpu_enable_command_buffer" not in flags:
        remedy = "docs/command_buffers.md has the flags"
        report.hint("no flags for CUDA graphs are set, as this version of jaxlib is not one that we know", remedy)
