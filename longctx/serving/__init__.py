"""One engine: requests, a paged cache with shared prefixes, a scheduler, and one compiled step."""

from longctx.serving.config import EngineConfig as EngineConfig
from longctx.serving.engine.engine import Engine as Engine
from longctx.serving.engine.metrics import EngineStats as EngineStats
from longctx.serving.engine.metrics import StepMetrics as StepMetrics
from longctx.serving.parallel_plan import ParallelPlan as ParallelPlan
from longctx.serving.request.output import Event as Event
from longctx.serving.request.output import Metrics as Metrics
from longctx.serving.request.output import Output as Output
from longctx.serving.request.output import TokenLogprob as TokenLogprob
from longctx.serving.request.request import Request as Request
from longctx.serving.request.request import SamplingParams as SamplingParams
from longctx.serving.scheduler.slo import Slo as Slo
