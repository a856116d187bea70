"""The one predictor that ours and every baseline have."""

from longctx.models.config import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.roofline import roofline
from longctx.serving.predictor.runtime import Predictor


def make_predictor(model: LlamaConfig, topology: Topology, plan: ParallelPlan, max_rows: int) -> Predictor:
    """Predicts batches of a plan on a topology."""
    return roofline(model, topology, max_rows, stage=plan.stage, context=plan.context, tensor=plan.tensor)
