"""Clusters in virtual time: the conductor that serves, over simulated cores."""

from longctx.simulation.cluster.changes import Change as Change
from longctx.simulation.cluster.cluster_deployment import ClusterDeployment as ClusterDeployment
from longctx.simulation.cluster.cluster_instance import ClusterInstance as ClusterInstance
from longctx.simulation.cluster.cluster_record import ClusterRecord as ClusterRecord
from longctx.simulation.cluster.cluster_simulation import ClusterSimulation as ClusterSimulation
from longctx.simulation.cluster.prefix_tree_route import PrefixTreeRoute as PrefixTreeRoute
from longctx.simulation.cluster.settings import ClusterSettings as ClusterSettings
