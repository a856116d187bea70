"""Place of this process in a cluster, and the secret of its group, as given or from the environment.

`jax.distributed.initialize()` detects the place too, but does not return it, and aborts where a process is missing or
contradicts the others; so processes meet before that call. This is the only module that uses a private name of JAX,
`jax._src.clusters.ClusterEnv`.
"""

import ipaddress
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from longctx.serving.kv_cache.secret import make_secret, read_secret

ENVIRONMENT_VARIABLE = "LONGCTX_GROUP_SECRET"
_ADVICE = (
    "make one with `longctx group-secret > FILE`, and give it to every process, by --group-secret-file FILE, "
    f"{ENVIRONMENT_VARIABLE} or initialize(group_secret=...)"
)
_LEAST_CHARACTERS = 32


class ClusterEnv(NamedTuple):
    """Which of a cluster's processes this one is, and where to find process 0."""

    coordinator: str  # host:port of process 0
    num_processes: int
    process_id: int


def detect() -> ClusterEnv:
    """Detect the cluster from the environment variables of any launcher that JAX knows."""
    from jax._src.clusters import ClusterEnv as JaxClusterEnv

    found = JaxClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 30)
    coordinator, num_processes, process_id, _ = found
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            'coordinator="auto" found no Slurm, Open MPI or Kubernetes environment: give host:port, the number of '
            "processes and this one's id"
        )
    return ClusterEnv(coordinator, num_processes, process_id)


def make_group_secret() -> str:
    """Make a new secret: 256 random bits as text."""
    return secrets.token_hex(32)


def find_group_secret(given: str | None) -> str | None:
    """Return the secret that was given, or that of the environment; None: there is none."""
    secret = os.environ.get(ENVIRONMENT_VARIABLE) if given is None else given
    if secret is None:
        return None
    if not isinstance(secret, str):
        raise TypeError(f"group_secret must be text, got {type(secret).__name__}")
    secret = secret.strip()
    if len(secret) < _LEAST_CHARACTERS:
        raise ValueError(
            f"the group's secret must have at least {_LEAST_CHARACTERS} characters, got {len(secret)}: make one with "
            "`longctx group-secret > FILE`"
        )
    return secret


def secret_at(coordinator: str, ip: str, group_secret: str | None) -> str:
    """Return the secret of a group whose coordinator has this address: where none is given, that of this user.

    Raises:
      ValueError: other machines can reach the address, and no secret is given; or the user's own can't be kept.
    """
    if group_secret is not None:
        return group_secret
    if not ipaddress.ip_address(ip.partition("%")[0]).is_loopback:
        raise ValueError(
            f"coordinator {coordinator} can be reached from other machines, and the group has no secret: {_ADVICE}"
        )
    path = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "longctx" / "group-secret"
    try:
        make_secret(path)
        if path.stat().st_uid != os.geteuid():
            raise PermissionError(0, "it is another user's")
        return read_secret(path).decode("ascii")
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"the group has no secret, and {path} can't keep one: {why}: {_ADVICE}") from None
