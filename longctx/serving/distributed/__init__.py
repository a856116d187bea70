"""One engine in many processes: they meet, hear in every step what is new, and end together."""

from longctx.serving.distributed.initialize import initialize as initialize
from longctx.serving.distributed.mesh import describe_mesh as describe_mesh
from longctx.serving.distributed.mesh import make_process_mesh as make_process_mesh
from longctx.serving.distributed.process_group import ProcessGroup as ProcessGroup
