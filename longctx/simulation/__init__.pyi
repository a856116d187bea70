from .event_loop import Simulation as Simulation
from .record import Record as Record
from .record import Served as Served
from .replay import replay as replay
from .virtual_executor import VirtualExecutor as VirtualExecutor
