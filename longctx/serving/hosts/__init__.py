"""One engine in many processes: they meet, hear in every step what is new, and end together."""

from longctx.serving.hosts.hosts import Hosts as Hosts
from longctx.serving.hosts.join import join_hosts as join_hosts
from longctx.serving.hosts.mesh import describe_mesh as describe_mesh
from longctx.serving.hosts.mesh import host_mesh as host_mesh
