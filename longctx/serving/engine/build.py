"""Construction of an engine's core, and of what makes sequences for it, without JAX."""

import math
import os
from typing import TYPE_CHECKING, Any

from longctx.models.config import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving.config import EngineConfig
from longctx.serving.engine.core import Core
from longctx.serving.engine.input_processor import InputProcessor, SequenceMaker
from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.kv_cache.prefix import PageHash, Sessions
from longctx.serving.kv_cache.window_pages import WindowPages
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.measured import RuntimePredictor
from longctx.serving.predictor.roofline import roofline
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.scheduler.chunking import Chunker, Chunking, limit_of_rank
from longctx.serving.scheduler.exchange_rule import SHARDED, ExchangeRule
from longctx.serving.scheduler.policy import TenantShares, make_policy
from longctx.serving.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from longctx.models.tokenizer import Tokenizer


def build_core(
    model: LlamaConfig,
    config: EngineConfig,
    plan: ParallelPlan,
    predictor: Predictor,
    num_pages: int,
    max_length: int,
    tokenizer: "Tokenizer | None" = None,
    topology: Topology | None = None,
    element_bytes: float = 2,
) -> tuple[Core, InputProcessor, SequenceMaker]:
    """Build the core of an engine, and what turns requests into its sequences.

    Args:
      predictor: of its batches; it is corrected as batches run.
      num_pages: of each context rank.
      max_length: prompt and output of the longest sequence, in tokens.
      topology: by which exchanges are chosen, unless the predictor knows them. None: then they are not predicted.
      element_bytes: of a number that is not quantised.
    """
    page_hash = PageHash(os.urandom(32) if config.hash_key is None else config.hash_key, config.page_size)
    chunking = Chunking.parse(config.chunking, config.token_budget, config.max_running)
    slo = config.slo.per_token(plan.stage)
    chunker = Chunker(
        make_policy(config.policy, config.max_share),
        Corrected(predictor),
        chunking,
        plan,
        config.page_size,
        config.growing_buckets(2 if plan.context == 1 else 8),
        TenantShares(config.tenant_weights),
        math.inf if slo.step_seconds is None else slo.step_seconds,
        _exchange_rule(model, config, plan, chunking.tokens, predictor, topology, element_bytes),
    )
    scheduler = Scheduler(
        chunker,
        PagePool(num_pages, plan.context, windows=_window_pages(model, config, plan, num_pages, max_length)),
        config.page_size,
        config.max_running,
        config.admission,
        slo,
        plan.placer(
            config.page_size,
            config.token_budget,
            lambda tpot: limit_of_rank(predictor, chunking, tpot, plan.stage, max_length),
        ),
        keeps_pages=config.tiers is not None,
    )
    sessions = Sessions(page_hash, num_pages * plan.context)
    processor = InputProcessor(model, config, max_length, tokenizer, page_hash)
    return (
        Core(scheduler, page_hash if config.prefix_cache else None, sessions, config.run_ahead),
        processor,
        SequenceMaker(model, config, tokenizer, page_hash, sessions, processor.grammars),
    )


def _window_pages(
    model: LlamaConfig, config: EngineConfig, plan: ParallelPlan, num_pages: int, max_length: int
) -> WindowPages | None:
    """Make the window pages of a model that has layers with a window."""
    if model.sliding_window is None:
        return None
    count = config.count_window_pages(model.sliding_window, plan, num_pages, max_length)
    needs = config.window_needs(model.sliding_window, plan, max_length)
    # Where each page has its window page leases hold as many as they like.
    leased = None if count == num_pages else needs.num_leased + count - needs.per_rank
    return WindowPages(count, num_pages, plan.context, needs.span, leased)


def _exchange_rule(
    model: LlamaConfig,
    config: EngineConfig,
    plan: ParallelPlan,
    rows: int,
    predictor: Predictor,
    topology: Topology | None,
    element_bytes: float,
) -> ExchangeRule:
    """Make the exchange rule of a plan, with the predictor's costs of exchanges, or else those of the topology."""
    window = model.sliding_window or 0
    if plan.context == 1:
        return ExchangeRule(plan, rows, config.page_size, window=window)
    costs: Predictor | None = predictor
    link = getattr(predictor, "exchange", None)
    if link is None:
        costs = None
        if topology is not None:
            sizes: Any = {"stage": plan.stage, "tensor": plan.tensor, "context": plan.context, "ffn": plan.ffn}
            most, kv_dtype = config.token_budget, config.kv_dtype
            found = roofline(model, topology, most, element_bytes=element_bytes, kv_dtype=kv_dtype, **sizes)
            costs, link = found, found.exchange
    if isinstance(predictor, RuntimePredictor) and {"replicated", "pass_kv", "pass_q"} <= predictor.kinds:
        known = [name for name in SHARDED if name in predictor.kinds]
        return ExchangeRule(plan, rows, config.page_size, predictor, link, known, config.sharded_buckets, window)
    return ExchangeRule(plan, rows, config.page_size, costs, link, buckets=config.sharded_buckets, window=window)
