"""Many devices: attention over a mesh axis, by what moves, and who computes which token."""

from longctx.parallel.all_gather import all_gather_kv
from longctx.parallel.choose import Choice, EmpiricalRule, choose_ring
from longctx.parallel.context_parallel import context_parallel_attention
from longctx.parallel.cost import H100_RDMA, H100_TCP, Hardware, ModelShape
from longctx.parallel.kvp import kvp_attention, merge_over_ranks
from longctx.parallel.layout import layout_shards, shard_positions, shard_sequence, unshard_sequence
from longctx.parallel.mesh import make_mesh
from longctx.parallel.pass_kv import ring_pass_kv
from longctx.parallel.pass_q import ring_pass_q
from longctx.parallel.pipeline import enter_stage, sequence_pipeline
from longctx.parallel.varseq import VarseqPlan, plan_decode, plan_varseq

__all__ = [
    "H100_RDMA",
    "H100_TCP",
    "Choice",
    "EmpiricalRule",
    "Hardware",
    "ModelShape",
    "VarseqPlan",
    "all_gather_kv",
    "choose_ring",
    "context_parallel_attention",
    "enter_stage",
    "kvp_attention",
    "layout_shards",
    "make_mesh",
    "merge_over_ranks",
    "plan_decode",
    "plan_varseq",
    "ring_pass_kv",
    "ring_pass_q",
    "sequence_pipeline",
    "shard_positions",
    "shard_sequence",
    "unshard_sequence",
]
