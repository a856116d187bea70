"""The pipeline of systems before Mnemosyne: chunks of one prompt don't follow each other into it."""

from typing import Any

from longctx.simulation.instance.instance import Instance


class StandardPipeline(Instance):
    """An engine whose stages have chunks of different requests: a prompt's next chunk waits until the one before it has
    left the last stage.

    Stages are filled by other requests, or idle. So prompts are read no faster with more stages, and throughput grows
    only with several prompts at a time.

    Args:
      *args, **options: as for `Instance`.

    Source:
      Mnemosyne, 4.3 and figure 9 (a); Orca and Sarathi-Serve have such a pipeline.

    Examples:
      >>> from longctx.models import LlamaConfig
      >>> from longctx.serving import EngineConfig, ParallelPlan
      >>> from longctx.simulation import Instance, Simulation
      >>> from longctx.simulation.baselines import StandardPipeline
      >>> from longctx.simulation.hardware import predictor
      >>> from longctx.simulation.workloads import WorkloadRequest
      >>> model, plan = LlamaConfig.preset("llama-3-8b"), ParallelPlan(stage=4)
      >>> config = EngineConfig(num_pages=2000)
      >>> seconds = predictor(model, "h100-nvlink", plan, max_rows=config.token_budget)
      >>> for kind in (Instance, StandardPipeline):  # a prompt's chunks follow each other through the stages, or wait
      ...     [served] = Simulation([kind(model, config, seconds, plan)]).run([WorkloadRequest(0.0, 8000, 10)]).served
      ...     print(kind.__name__, round(served.ttft, 2))
      Instance 0.08
      StandardPipeline 0.27
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.core.scheduler.steps_between_chunks = self.plan.stage
