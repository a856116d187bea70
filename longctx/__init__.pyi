"""What `longctx` exports, each loaded when it is first used."""

from .gpu_flags import xla_flags as xla_flags
from .kernels import attention as attention
from .kernels import dot_product_attention as dot_product_attention
from .kernels import merge_state as merge_state
from .kernels import merge_states as merge_states
from .kernels import paged_attention as paged_attention
from .models import Llama as Llama
from .models import LlamaConfig as LlamaConfig
from .models import load_checkpoint as load_checkpoint
from .models import load_tokenizer as load_tokenizer
from .models import save_checkpoint as save_checkpoint
from .parallel import all_gather_kv as all_gather_kv
from .parallel import choose_ring as choose_ring
from .parallel import context_parallel_attention as context_parallel_attention
from .parallel import kvp_attention as kvp_attention
from .parallel import make_mesh as make_mesh
from .parallel import plan_varseq as plan_varseq
from .parallel import ring_pass_kv as ring_pass_kv
from .parallel import ring_pass_q as ring_pass_q
from .parallel import sequence_pipeline as sequence_pipeline
from .parallel import shard_positions as shard_positions
from .parallel import shard_sequence as shard_sequence
from .parallel import unshard_sequence as unshard_sequence
from .serving import Engine as Engine
from .serving import EngineConfig as EngineConfig
from .serving import Output as Output
from .serving import ParallelPlan as ParallelPlan
from .serving import Request as Request
from .serving import SamplingParams as SamplingParams

__version__: str
