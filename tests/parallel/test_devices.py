"""`cpu_devices` and `use_devices` in fresh processes, since a process makes its devices once."""

import os
import subprocess
import sys

import jax
import pytest

from longctx.parallel import cpu_devices


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    program = f"import jax, longctx\nfrom longctx.parallel import cpu_devices, use_devices\n{program}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=plain | environment)


@pytest.mark.parametrize(
    ("program", "environment", "devices"),
    [
        ("cpu_devices(4); cpu_devices(8); cpu_devices(2)", {}, 8),
        ("cpu_devices(4)", {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, 4),
    ],
)
def test_before_the_first_use_of_a_device(program: str, environment: dict[str, str], devices: int) -> None:
    result = run(f"{program}; print(len(jax.devices()), jax.devices()[0].platform)", **environment)
    assert result.stdout.split() == [str(devices), "cpu"], result.stderr


def test_after_the_first_use_of_a_device_is_too_late() -> None:
    result = run("jax.numpy.ones(1); cpu_devices(1); cpu_devices(8)")
    last = result.stderr.splitlines()[-1]
    assert last == (
        "RuntimeError: cpu_devices(8) must come before JAX first uses a device: by now it runs on 1 cpu device"
    )


def test_enough_devices_are_left_as_they_are() -> None:
    before = jax.devices()
    cpu_devices(8)
    assert jax.devices() == before


@pytest.mark.parametrize("count", [0, 2.5, "8"])
def test_a_count_that_is_none_is_refused(count: object) -> None:
    with pytest.raises(ValueError, match="count must be an integer of at least 1, got"):
        cpu_devices(count)  # type: ignore[arg-type]


FAKE = """
from types import SimpleNamespace
made = jax.devices
def devices(*arguments):
    if arguments or jax.config.jax_platforms == "cpu":
        return made(*arguments)
    made()  # as JAX does, which has them from now on
    return [SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")] * {count}
jax.devices = devices
"""


@pytest.mark.parametrize(
    ("program", "found", "says"),
    [
        ("use_devices(4)", "4 cpu", "use_devices(4): 4 CPU devices, as there is no accelerator"),
        (f"{FAKE.format(count=8)}use_devices(4)", "8 gpu", "use_devices(4): 8 devices of NVIDIA H100 80GB HBM3"),
        (
            f"{FAKE.format(count=1)}use_devices(8)",
            "8 cpu",
            "use_devices(8): 8 CPU devices, as there is 1 of NVIDIA H100 80GB HBM3",
        ),
    ],
)
def test_accelerators_are_used_where_there_are_enough(program: str, found: str, says: str) -> None:
    result = run(f"{program}\nx = jax.devices(); print(len(x), x[0].platform)\nassert jax.numpy.ones(2).sum() == 2")
    assert result.returncode == 0, result.stderr
    assert (result.stdout.strip(), result.stderr.strip()) == (found, says)


def test_too_few_devices_that_are_in_use_are_refused() -> None:
    last = run("jax.numpy.ones(1); use_devices(1); use_devices(8)").stderr.splitlines()[-1]
    assert last.endswith("use_devices(8) must come before JAX first uses a device: by now it runs on 1 cpu device")
