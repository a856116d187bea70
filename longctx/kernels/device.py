"""The device to compile for: the default device, or ahead of time that of the mesh of `jax.set_mesh`."""

import contextlib
import contextvars
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from longctx.kernels.mosaic_gpu.ptxas import Ptxas, ptxas_in_use

_HOPPER = ("H100", "H200", "H800", "H20", "GH200")
# Ahead of time only the name is known. Words of names of GPUs before Ampere, and of another maker.
_BEFORE_AMPERE = re.compile(
    r"\b([KMPV]\d{2,3}|P4|T4|GTX|TITAN|RTX 20\d\d|Quadro|AMD|MI\d+\w*|Radeon|gfx\w+)\b", re.IGNORECASE
)


class Interpreter(NamedTuple):
    """Settings of the interpreter that replaces the device while `mosaic_gpu.adapter.interpreted` is in force."""

    params: Any
    num_multiprocessors: int
    errors: list[str]  # what kernels did that hardware would not do


INTERPRETER: contextvars.ContextVar[Interpreter | None] = contextvars.ContextVar("interpreter", default=None)
TRITON_INTERPRETED: contextvars.ContextVar[bool] = contextvars.ContextVar("triton_interpreted", default=False)
"""Whether `triton.adapter.interpreted` is in force."""
_COMPILED_FOR: contextvars.ContextVar["Device | None"] = contextvars.ContextVar("compiled_for", default=None)


class Device(NamedTuple):
    """Properties of a device that the choice and the grid of a kernel depend on."""

    kind: str
    platform: str
    is_hopper: bool
    num_multiprocessors: int
    cuda_version: int = 0  # the platform's, 12090 for 12.9.0 and 12.9.1; 0 if unknown
    ptxas: Ptxas = Ptxas()  # what assembles kernels for it, if it is a Hopper
    capability: tuple[int, int] | None = None  # compute capability of an NVIDIA GPU

    @property
    def is_gpu(self) -> bool:
        return self.platform in ("gpu", "cuda")

    def unreserved(self, reserved: int) -> int:
        """Multiprocessors for a kernel that leaves some to others; at least one."""
        return max(1, self.num_multiprocessors - reserved)

    @classmethod
    def target(cls) -> "Device":
        """The device that a program traced now is compiled for."""
        if (interpreter := INTERPRETER.get()) is not None:
            return cls("interpreter", "gpu", True, interpreter.num_multiprocessors)
        if (device := _COMPILED_FOR.get()) is not None:
            return cls(*device)
        abstract = jax.sharding.get_abstract_mesh().abstract_device
        if abstract is not None:
            return cls._of(abstract.device_kind, abstract.platform, None, abstract.num_cores)
        default: Any = getattr(jax.config, "jax_default_device", None)
        device = default if isinstance(default, jax.Device) else jax.devices(default)[0]
        capability = getattr(device, "compute_capability", None)
        found = cls._of(device.device_kind, device.platform, capability, getattr(device, "core_count", None))
        version = re.search(r"cuda (\d+)", str(device.client.platform_version))
        return found._replace(cuda_version=int(version[1]) if version else 0)

    @classmethod
    def _of(cls, kind: str, platform: str, capability: str | None, num_cores: int | None) -> "Device":
        found = cls(kind, platform, False, 132)
        if not found.is_gpu:
            return found
        by_name = any(name in kind.split() for name in _HOPPER)
        is_hopper = by_name if capability is None else str(capability) == "9.0"
        if capability is None:
            known = (9, 0) if is_hopper else None if _BEFORE_AMPERE.search(kind) else (8, 0)
        else:  # "gfx942" is one of AMD's
            parts = re.fullmatch(r"(\d+)\.(\d+)", str(capability))
            known = parts and (int(parts[1]), int(parts[2]))
        return found._replace(
            is_hopper=is_hopper,
            num_multiprocessors=num_cores or 132,
            ptxas=ptxas_in_use() if is_hopper else Ptxas(),
            capability=known,
        )


@contextlib.contextmanager
def compiled_for(device: Device) -> Iterator[None]:
    """A context, or a decorator of functions, in which `Device.target` is this device."""
    token = _COMPILED_FOR.set(device)
    try:
        yield
    finally:
        _COMPILED_FOR.reset(token)
