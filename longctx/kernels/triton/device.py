"""Whether a device runs the Triton kernels."""

import contextvars

from longctx.kernels.mosaic_gpu.device import Device

INTERPRETED: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreted", default=False)
"""Set by `adapter.interpreted`."""

# Its first GPU with asynchronous copies to shared memory and products of bfloat16.
_AMPERE = (8, 0)


def unsupported_device() -> str | None:
    """Why the device to compile for does not run the Triton kernels; None if it does."""
    device = Device.target()
    if INTERPRETED.get() or (device.capability is not None and device.capability >= _AMPERE):
        return None
    return f"needs an NVIDIA GPU of compute capability 8.0 or later, got {device.platform} {device.kind!r}"
