"""One engine: requests, a paged cache with shared prefixes, a scheduler, and one compiled step."""

from longctx.serving.config import EngineConfig as EngineConfig
from longctx.serving.engine import Engine as Engine
from longctx.serving.monitor import EngineStats as EngineStats
from longctx.serving.monitor import StepMetrics as StepMetrics
from longctx.serving.output import Event as Event
from longctx.serving.output import Metrics as Metrics
from longctx.serving.output import Output as Output
from longctx.serving.output import TokenLogprob as TokenLogprob
from longctx.serving.parallel_plan import ParallelPlan as ParallelPlan
from longctx.serving.request import Request as Request
from longctx.serving.request import SamplingParams as SamplingParams
from longctx.serving.slo import Slo as Slo
