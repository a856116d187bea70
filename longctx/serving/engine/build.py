"""Builds the core of an engine, and what makes sequences for it, without JAX."""

import math
import os
from typing import TYPE_CHECKING, NamedTuple

from longctx.models.config import LlamaConfig
from longctx.parallel.cost import Hardware, ModelShape
from longctx.serving.config import EngineConfig
from longctx.serving.engine.core import Core
from longctx.serving.engine.input_processor import InputProcessor, SequenceMaker
from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.kv_cache.sessions import Sessions
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.runtime import CurvePredictor, Predictor
from longctx.serving.scheduler.chunking import Chunker, Chunking, limit_of_rank
from longctx.serving.scheduler.exchange_rule import ExchangeRule
from longctx.serving.scheduler.policy import make_policy
from longctx.serving.scheduler.scheduler import Scheduler
from longctx.serving.scheduler.tenants import TenantShares

if TYPE_CHECKING:
    from longctx.models.tokenizer import Tokenizer


class Built(NamedTuple):
    """A core, and what turns requests into its sequences."""

    core: Core
    input_processor: InputProcessor
    sequence_maker: SequenceMaker


def build_core(
    model: LlamaConfig,
    config: EngineConfig,
    plan: ParallelPlan,
    predictor: Predictor,
    num_pages: int,
    max_length: int,
    tokenizer: "Tokenizer | None" = None,
    hardware: Hardware | None = None,
) -> Built:
    """The core of an engine.

    Args:
      predictor: of its batches; it is corrected as batches run.
      num_pages: of each context rank.
      max_length: prompt and output of the longest sequence, in tokens.
      hardware: a device and its link over `context`, by which exchanges are chosen; None: the predictor's.
    """
    page_hash = PageHash(os.urandom(32) if config.hash_key is None else config.hash_key, config.page_size)
    chunking = Chunking.parse(config.chunking, config.token_budget, config.max_running)
    heads = ModelShape(model.num_heads, model.num_kv_heads, model.head_dim).split(plan.tensor)
    if hardware is None and isinstance(predictor, CurvePredictor) and predictor.exchange is not None:
        hardware = predictor.exchange.hardware
    chunker = Chunker(
        make_policy(config.policy, config.max_share),
        Corrected(predictor),
        chunking,
        plan,
        config.page_size,
        config.growing_buckets(2 if plan.context == 1 else 8),
        TenantShares(config.tenant_weights),
        math.inf if config.slo.step_seconds is None else config.slo.step_seconds,
        ExchangeRule(plan, chunking.tokens, heads, hardware),
    )
    scheduler = Scheduler(
        chunker,
        PagePool(num_pages, plan.context),
        config.page_size,
        config.max_running,
        config.admission,
        config.slo,
        plan.placer(
            config.page_size,
            config.token_budget,
            lambda tpot: limit_of_rank(predictor, chunking, tpot, plan.stage, max_length),
        ),
    )
    sessions = Sessions(page_hash, num_pages * plan.context)
    return Built(
        Core(scheduler, page_hash if config.prefix_cache else None, sessions, config.run_ahead),
        InputProcessor(model, config, max_length, tokenizer, page_hash),
        SequenceMaker(model, config, tokenizer, page_hash, sessions),
    )
