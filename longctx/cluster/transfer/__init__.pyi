from .lease import Exporter as Exporter
from .lease import LeaseGone as LeaseGone
from .local import LocalReceiver as LocalReceiver
from .options import TransferOptions as TransferOptions
from .stats import Outcome as Outcome
from .stats import TransferStats as TransferStats
from .zmq_receiver import PageReceiver as PageReceiver
from .zmq_sender import PageSender as PageSender
