from .cluster_deployment import ClusterDeployment as ClusterDeployment
from .cluster_instance import ClusterInstance as ClusterInstance
from .cluster_record import ClusterRecord as ClusterRecord
from .prefix_tree_route import PrefixTreeRoute as PrefixTreeRoute
from .settings import Change as Change
from .settings import ClusterSettings as ClusterSettings
