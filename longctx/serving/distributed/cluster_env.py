"""Where this process is among many, as the cluster's own environment tells it. The one user of a private name.

`jax.distributed.initialize()` finds this out by itself, but tells nobody; and we have to meet before it is called,
since where a process is missing or contradicts the others, it aborts. The name: `jax._src.clusters.ClusterEnv`.
"""

from typing import NamedTuple


class ClusterEnv(NamedTuple):
    coordinator: str  # host:port, of process 0
    num_processes: int
    process_id: int


def detect() -> ClusterEnv:
    """From Slurm, Open MPI, Kubernetes or what else JAX knows.

    Raises:
      ValueError: nothing of the kind is there.
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
