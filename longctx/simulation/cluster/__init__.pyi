from .cluster_instance import ClusterInstance as ClusterInstance
from .settings import Change as Change
from .settings import ClusterSettings as ClusterSettings
from .settings import ServerTimes as ServerTimes
