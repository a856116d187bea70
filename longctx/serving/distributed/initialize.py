"""`initialize`: meeting of processes, which compare their software and make their devices one JAX system."""

import contextlib
import hashlib
import ipaddress
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib

import longctx
from longctx import extras
from longctx.models.validation import check_integer, check_real
from longctx.serving.distributed.environment import ClusterEnv, detect, find_group_secret
from longctx.serving.distributed.process_group import ProcessGroup


def initialize(
    coordinator: str = "auto",
    num_processes: int | None = None,
    process_id: int | None = None,
    failure_timeout: float = 30.0,
    join_timeout: float = 120.0,
    ports: tuple[int, int] | None = None,
    group_secret: str | None = None,
) -> ProcessGroup:
    """Join the processes that run an engine together; call it before anything else asks JAX for devices.

    The processes meet at process 0 by ZeroMQ. When all have come and agree, each calls `jax.distributed.initialize`,
    which would abort a process otherwise. A process that is alone on its host takes all of the host's GPUs, or those
    in `CUDA_VISIBLE_DEVICES` or `JAX_LOCAL_DEVICE_IDS`. Where a host has several processes and neither variable is
    set, each takes the GPU with its local id, as Slurm or Open MPI give it.

    Args:
      coordinator: `host:port` where process 0 listens, or `"auto"`: taken from Slurm, Open MPI or Kubernetes.
      num_processes, process_id: number of processes, and the id of this one, from 0; None with `"auto"`.
      failure_timeout: seconds within which all exit when one process is gone or a step yields no results, at least 2.
      join_timeout: seconds within which all processes have to come, and for which they later wait for each other to
        load and compile; at least 0.5.
      ports: (first, last) of the ports of which process 0 listens on one beside the coordinator's. None: any.
      group_secret: text of at least 32 characters that all processes share, as from `longctx group-secret`: only
        processes with it can join or listen. None: what `LONGCTX_GROUP_SECRET` holds. Without one the coordinator must
        be a loopback address, and all processes of one user, who has a secret of his own (0600, in
        `~/.local/state/longctx`).

    Returns:
      The group, which is what `Engine` and `make_process_mesh` take.

    Raises:
      TypeError, ValueError: an argument is wrong, or contradicts another process's.
      MissingExtra: pyzmq is not installed; a ModuleNotFoundError and a ValueError.
      TimeoutError: process 0 did not answer, or some process did not come.

    Examples:
      >>> from longctx.serving.distributed import initialize
      >>> with initialize("127.0.0.1:9876", num_processes=1, process_id=0) as group:  # one process waits for none
      ...     group.is_first, group.num_processes
      (True, 1)
    """
    failure_timeout = check_real("failure_timeout", failure_timeout, 2)
    join_timeout = check_real("join_timeout", join_timeout, 0.5)
    group_secret = find_group_secret(group_secret)
    cluster_env = _cluster_env(coordinator, num_processes, process_id)
    if ports is not None and not (len(ports) == 2 and 0 < ports[0] < ports[1] < 65536):
        raise ValueError(f"ports must be the first and the last of a range, got {ports!r}")
    if cluster_env.num_processes == 1:
        return ProcessGroup.alone()
    with extras.needed("distributed", "an engine in several processes"):
        from longctx.serving.distributed import rendezvous
    options = rendezvous.RendezvousOptions(failure_timeout, join_timeout, ports or rendezvous.ANY_PORT, group_secret)
    meet = rendezvous.lead if cluster_env.process_id == 0 else rendezvous.join
    group, jax_address = meet(cluster_env, options)
    with contextlib.suppress(AttributeError):  # JAX's preemption service would swallow SIGTERM
        jax.config.update("jax_enable_preemption_service", False)
    takes_all = group.host_names.count(group.host_name) == 1 or "CUDA_VISIBLE_DEVICES" in os.environ
    try:
        timeouts = {"failure_timeout": failure_timeout, "join_timeout": join_timeout}
        group.agree("software", _software() | {"num_processes": cluster_env.num_processes, **timeouts})
        found = group.gather("what their names stand for", loopback_of(group.host_name))
        unreachable = {name: ip for name, ip in zip(group.host_names, found, strict=True) if ip is not None}
        jax.distributed.initialize(
            jax_address,
            cluster_env.num_processes,
            cluster_env.process_id,
            cluster_detection_method="deactivate" if takes_all else None,
            initialization_timeout=int(join_timeout) + 1,
            # Longer than the watchdog's timeout, as JAX does not report the cause.
            heartbeat_timeout_seconds=int(2 * failure_timeout) + 1,
            shutdown_timeout_seconds=int(failure_timeout) + 1,
            coordinator_bind_address=jax_address,
        )
        if unreachable and len(set(group.host_names)) > 1 and jax.default_backend() == "cpu":
            raise ValueError(unreachable_message(unreachable))
    except BaseException as error:
        group.fail(f"{type(error).__name__}: {error}")
        raise
    return group


def loopback_of(host_name: str) -> str | None:
    """Return the loopback address that a host's own name stands for; None: it stands for one that others reach."""
    try:
        ip = str(socket.getaddrinfo(host_name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
    return ip if ipaddress.ip_address(ip.partition("%")[0]).is_loopback else None


def unreachable_message(found: Mapping[str, str]) -> str:
    """Say why CPUs of these hosts, with the loopback addresses of their names, can't compute together."""
    hosts = " and ".join(f"{name} for {ip}" for name, ip in sorted(found.items()))
    return (
        f"coordinator: on their own hosts the names stand for loopback addresses, {hosts}. Gloo, by which JAX moves "
        "data between CPUs, gives these to the other hosts, which can't reach them: in /etc/hosts of each, put the "
        "host's own address in the line of its name"
    )


def _cluster_env(coordinator: str, num_processes: int | None, process_id: int | None) -> ClusterEnv:
    if not isinstance(coordinator, str):
        raise TypeError(f'coordinator must be host:port or "auto", got {coordinator!r}')
    if coordinator == "auto":
        if num_processes is not None or process_id is not None:
            raise ValueError('num_processes and process_id must be None with coordinator="auto", which finds them')
        return detect()
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f'coordinator must be host:port or "auto", got {coordinator!r}')
    if num_processes is None or process_id is None:
        raise ValueError(f"num_processes and process_id must be given with coordinator={coordinator!r}")
    num_processes = check_integer("num_processes", num_processes, 1)
    process_id = check_integer("process_id", process_id, 0)
    if process_id >= num_processes:
        raise ValueError(f"process_id must be below num_processes={num_processes}, got {process_id}")
    return ClusterEnv(coordinator, num_processes, process_id)


def _software() -> dict[str, Any]:
    """Versions of the software, and a hash of this package: processes with other code might decide otherwise."""
    code, folder = hashlib.blake2b(digest_size=8), Path(longctx.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        code.update(path.read_bytes())
    return {
        "longctx": code.hexdigest(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }
