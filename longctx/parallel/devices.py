"""Devices for a mesh: accelerators where there are enough, else the CPU, divided into as many."""

import sys

import jax
from jax.extend import backend

from longctx.parallel.cost import check_count


def use_devices(count: int) -> None:
    """Make JAX compute on at least `count` devices: the accelerators, or if they are too few, the CPU in parts.

    It prints on standard error which of the two it is. Call it before anything is computed, as `cpu_devices`.

    Args:
      count: the least number of devices.

    Raises:
      ValueError: count is no positive integer.
      RuntimeError: JAX has made its devices already, and they are fewer.

    Examples:
      >>> from longctx.parallel import make_mesh, use_devices
      >>> use_devices(8)
      >>> dict(make_mesh(context=8).shape)
      {'stage': 1, 'context': 8, 'tensor': 1}
    """
    count = check_count("count", count, 1)
    try:
        # The number that the CPU is divided into has to be set before JAX looks for accelerators.
        jax.config.update("jax_num_cpu_devices", max(count, _num_cpu_devices()))
    except RuntimeError:  # JAX has made its devices
        if len(jax.devices()) < count:
            raise RuntimeError(_too_late("use_devices", count)) from None
    devices = jax.devices()
    if len(devices) < count:  # only now is it known: make them again
        backend.clear_backends()
        jax.config.update("jax_platforms", "cpu")
        print(f"use_devices({count}): {count} CPU devices, as there {_described(devices)}", file=sys.stderr)
    elif devices[0].platform == "cpu":
        print(f"use_devices({count}): {len(devices)} CPU devices, as there is no accelerator", file=sys.stderr)
    else:
        print(f"use_devices({count}): {len(devices)} devices of {devices[0].device_kind}", file=sys.stderr)


def cpu_devices(count: int) -> None:
    """Make JAX compute on the CPU, divided into at least `count` devices, also where there are accelerators.

    `use_devices` takes those where there are enough. Call it before anything is computed: JAX makes its devices when
    they are first used. If they are CPU devices already and enough of them, nothing changes. They share the cores, so a
    mesh of them shows what is computed, not how fast.

    Args:
      count: the least number of devices.

    Raises:
      ValueError: count is no positive integer.
      RuntimeError: JAX has made its devices already, and they are fewer, or no CPU devices.

    Examples:
      >>> import jax
      >>> from longctx.parallel import cpu_devices, make_mesh
      >>> cpu_devices(8)
      >>> dict(make_mesh(context=8).shape)
      {'stage': 1, 'context': 8, 'tensor': 1}
    """
    count = check_count("count", count, 1)
    try:
        jax.config.update("jax_num_cpu_devices", max(count, _num_cpu_devices()))
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # JAX has made its devices
        devices = jax.devices()
        if devices[0].platform != "cpu" or len(devices) < count:
            raise RuntimeError(_too_late("cpu_devices", count)) from None


def _num_cpu_devices() -> int:
    return getattr(jax.config, "jax_num_cpu_devices", -1)  # JAX's own default is -1: one device


def _too_late(name: str, count: int) -> str:
    devices = jax.devices()
    found = f"{len(devices)} {devices[0].platform} device{'s' * (len(devices) != 1)}"
    return f"{name}({count}) must come before JAX first uses a device: by now it runs on {found}"


def _described(devices: list[jax.Device]) -> str:
    return f"{'is' if len(devices) == 1 else 'are'} {len(devices)} of {devices[0].device_kind}"
