from .initialize import initialize as initialize
from .mesh import describe_mesh as describe_mesh
from .mesh import make_process_mesh as make_process_mesh
from .process_group import ProcessGroup as ProcessGroup
