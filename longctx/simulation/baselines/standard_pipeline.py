"""The pipeline of systems before Mnemosyne: chunks of one prompt don't follow each other into it."""

from typing import Any

from longctx.simulation.instance.instance import Instance


class StandardPipeline(Instance):
    """An engine whose stages have chunks of different requests: a prompt's next chunk waits until the one before it has
    left the last stage.

    Stages are filled by other requests, or idle. So prompts are read no faster with more stages, and throughput grows
    only with several prompts at a time. Arguments as those of `Instance`.

    Source: Mnemosyne, 4.3 and figure 9 (a); Orca and Sarathi-Serve have such a pipeline.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.core.scheduler.steps_between_chunks = self.plan.stage
