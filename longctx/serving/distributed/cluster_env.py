"""Detects this process's place in a cluster from the environment of Slurm, Open MPI or Kubernetes.

`jax.distributed.initialize()` detects it too, but does not return it, and aborts where a process is missing or
contradicts the others; so processes meet before that call. This is the only module that uses a private name of JAX,
`jax._src.clusters.ClusterEnv`.
"""

from typing import NamedTuple


class ClusterEnv(NamedTuple):
    """Which of a cluster's processes this one is, and where to find process 0."""

    coordinator: str  # host:port of process 0
    num_processes: int
    process_id: int


def detect() -> ClusterEnv:
    """Detect the cluster from the environment variables of any launcher that JAX knows.

    Raises:
      ValueError: there are none.
    """
    from jax._src.clusters import ClusterEnv as JaxClusterEnv

    found = JaxClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 30)
    coordinator, num_processes, process_id, _ = found
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            'coordinator="auto" found no Slurm, Open MPI or Kubernetes environment: give host:port, the number of '
            "processes and this one's id"
        )
    return ClusterEnv(coordinator, num_processes, process_id)
