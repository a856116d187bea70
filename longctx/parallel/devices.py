"""Many CPU devices, to try a mesh where there is one accelerator, or none."""

import jax

from longctx.parallel.cost import check_count


def cpu_devices(count: int) -> None:
    """Make JAX compute on the CPU, divided into at least `count` devices.

    Call it before anything is computed: JAX makes its devices when they are first used. If they are CPU devices already
    and enough of them, nothing changes. They share the cores, so a mesh of them shows what is computed, not how fast.

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
        # JAX's own default is -1: one device.
        jax.config.update("jax_num_cpu_devices", max(count, getattr(jax.config, "jax_num_cpu_devices", -1)))
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # JAX has made its devices
        devices = jax.devices()
        if devices[0].platform != "cpu" or len(devices) < count:
            raise RuntimeError(
                f"cpu_devices({count}) must come before JAX first uses a device: by now it runs on {len(devices)} "
                f"{devices[0].platform} device{'s' * (len(devices) != 1)}"
            ) from None
