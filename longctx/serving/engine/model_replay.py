"""Replay of a log on the model that it was recorded of, to compare tokens: step by step, or on another plan."""

import dataclasses
import time
from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from longctx.models import Llama, Tokenizer
from longctx.models.params import Params
from longctx.parallel import make_mesh
from longctx.serving.distributed.digest import DecisionDigest
from longctx.serving.engine.active_request import ActiveRequests
from longctx.serving.engine.build import build_core
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.steps import run_step
from longctx.serving.executor.executor import DeviceExecutor
from longctx.serving.executor.interface import Progress
from longctx.serving.executor.submit_queue import EndedStep, SubmitQueue
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.recording.header import Header
from longctx.serving.recording.reader import RecordedLog
from longctx.serving.recording.records import (
    Arrived,
    Cancelled,
    Cleared,
    Content,
    Ended,
    Forgotten,
    LoadEnded,
    RecordedRequest,
    Released,
    Snapshot,
    Step,
    request_of,
    split_keys,
)
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import State, completion_of


class Mismatch(NamedTuple):
    """A token that is not the recorded one; `before`: the prompt, and the output until there."""

    request_id: str
    completion: int
    position: int
    recorded: int
    computed: int
    before: list[int]
    sampling: SamplingParams

    def __str__(self) -> str:
        which = f"completion {self.completion} of " if self.completion else ""
        return (
            f"{which}request {self.request_id!r}: its output token {self.position} is {self.computed}, and "
            f"{self.recorded} was recorded"
        )


class ModelReplay:
    """Replay of the recorded batches on the device: the same rows in the same steps, so tokens are bitwise equal.

    Raises:
      ValueError: the engine had a custom policy or predictor, which a log does not hold.
    """

    def __init__(
        self, log: RecordedLog, model: Llama, params: Params, mesh: Mesh | None, tokenizer: Tokenizer | None
    ) -> None:
        header = log.header
        if header.predictor is None or header.custom_policy is not None:
            raise ValueError("the recorded engine had a custom policy or predictor, which a log does not hold")
        self._log, config, plan = log, header.config, header.plan
        mesh = mesh or make_mesh()
        self._core, self._input_processor, maker = build_core(
            model.config,
            config,
            plan,
            header.predictor,
            header.num_pages,
            header.max_length,
            tokenizer,
            header.topology,
            header.element_bytes,
        )
        self._executor = DeviceExecutor.on_mesh(model, params, config, plan, mesh, header.num_pages, header.max_length)
        self._queue = SubmitQueue(self._executor, time.monotonic, plan.stage)
        self._requests = ActiveRequests(self._core, self._input_processor, maker, self._executor)
        self._decisions = DecisionDigest()

    def compile(self, progress: Progress) -> None:
        """Compile the programs of all steps."""
        self._executor.compile(progress)

    def run(self) -> tuple[int, Mismatch | None]:
        """Replay all steps, until a token differs; returns how many steps that were, and the difference.

        Raises:
          ValueError: a decision differs, or the log is damaged.
        """
        steps = 0
        for record in self._log.records():
            match record:
                case Arrived(content=Content() as content):
                    prepared = self._input_processor.prepare(request_of(content, record.request_id))
                    self._requests.repeat(prepared, record.request_id, record.now)
                case Snapshot():
                    raise ValueError(
                        f"{self._log.directory} lacks its beginning: the cache's contents then are not known. Another "
                        "plan, such as --stage, can be replayed"
                    )
                case LoadEnded():
                    raise ValueError(
                        f"{self._log.directory}: pages were loaded from beyond the devices, and a log does not hold "
                        "them. Another plan, such as --stage, can be replayed"
                    )
                case Cancelled():
                    self._requests.leave(self._requests[record.request_id], record.lease)
                case Released():
                    self._core.leases.release(record.lease_id)
                case Forgotten():
                    self._core.forget(split_keys(record.keys))
                case Cleared():
                    self._core.pool.clear()
                case Step():
                    mismatch = self._step(steps, record)
                    if mismatch is not None:
                        return steps, mismatch
                    steps += 1
        return steps, None

    def _step(self, number: int, record: Step) -> Mismatch | None:
        step, ended = run_step(self._core, self._queue, record.now, [self]), record.ended
        if self._decisions.raw != record.digest or (step is None) != (ended is None):
            raise ValueError(f"step {number} differs on the model: the replay decided\n{self._decisions}")
        if step is None or ended is None:
            return None
        mismatch = _first_mismatch(step, ended)
        if mismatch is None:
            seconds = ended.duration if ended.is_exact else None
            self._requests.deliver(self._core.end(step.batch, step.results, ended.finished, seconds))
        return mismatch

    # As a `DecisionLog`.

    def note_plan(self, batch: Batch) -> None:
        self._decisions.add_plan(batch)

    def note_draw(self, batch: Batch, tokens: List[int]) -> None:
        pass


def _first_mismatch(step: EndedStep, ended: Ended) -> Mismatch | None:
    for sequence, token, recorded in zip(
        step.batch.sampled, step.results.tokens, np.frombuffer(ended.tokens or b"", "<i4").tolist(), strict=True
    ):
        if token != recorded and sequence.state is not State.FINISHED:
            completion = completion_of(sequence)
            position = completion.num_known - completion.num_prompt
            request = completion.request
            before = completion.tokens.tolist()
            return Mismatch(
                completion.request_id, completion.index, position, recorded, token, before, request.sampling
            )
    return None


def replay_on_plan(
    header: Header,
    plan: ParallelPlan,
    requests: list[RecordedRequest],
    model: Llama,
    params: Params,
    mesh: Mesh | None,
    tokenizer: Tokenizer | None,
) -> tuple[int, list[Mismatch]]:
    """Serve the same requests on any plan; returns how many completions were compared, and their first mismatches."""
    config = header.config
    pages = -(-header.num_pages * header.plan.context // plan.context)
    engine = Engine(
        model, params, dataclasses.replace(config, num_pages=pages), mesh=mesh, tokenizer=tokenizer, plan=plan
    )
    # Only as many tokens as were recorded are of use; ids may have come again.
    asked = [
        dataclasses.replace(
            each.request,
            request_id=str(i),
            sampling=dataclasses.replace(each.request.sampling, max_tokens=max(map(len, each.tokens))),
        )
        for i, each in enumerate(requests)
        if any(each.tokens)
    ]
    compared, mismatches = 0, []
    for output in engine.generate(asked):
        recorded = requests[int(output.request_id)]
        tokens, request = recorded.tokens[output.index], recorded.request
        compared += 1
        differs = [i for i, (one, other) in enumerate(zip(tokens, output.token_ids, strict=False)) if one != other]
        missing = len(output.token_ids) < len(tokens)
        if differs or missing:
            at = differs[0] if differs else len(output.token_ids)
            before = [*map(int, request.prompt), *tokens[:at]]
            computed = output.token_ids[at] if differs else -1
            assert request.request_id is not None
            mismatches.append(
                Mismatch(request.request_id, output.index, at, tokens[at], computed, before, request.sampling)
            )
    return compared, mismatches
