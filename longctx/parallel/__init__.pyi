"""What `longctx.parallel` exports, each loaded when it is first used."""

from .all_gather import all_gather_kv as all_gather_kv
from .choose import Choice as Choice
from .choose import EmpiricalRule as EmpiricalRule
from .choose import choose_ring as choose_ring
from .context_parallel import context_parallel_attention as context_parallel_attention
from .cost import H100_RDMA as H100_RDMA
from .cost import H100_TCP as H100_TCP
from .cost import Hardware as Hardware
from .cost import ModelShape as ModelShape
from .devices import cpu_devices as cpu_devices
from .kvp import kvp_attention as kvp_attention
from .kvp import merge_over_ranks as merge_over_ranks
from .layout import layout_shards as layout_shards
from .layout import shard_positions as shard_positions
from .mesh import make_mesh as make_mesh
from .pass_kv import ring_pass_kv as ring_pass_kv
from .pass_q import ring_pass_q as ring_pass_q
from .pipeline import enter_stage as enter_stage
from .pipeline import sequence_pipeline as sequence_pipeline
from .reshard import shard_sequence as shard_sequence
from .reshard import unshard_sequence as unshard_sequence
from .varseq import VarseqPlan as VarseqPlan
from .varseq import plan_decode as plan_decode
from .varseq import plan_varseq as plan_varseq
