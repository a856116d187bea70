"""Begins the log of an engine: its header says what the engine is made of."""

import datetime

from longctx.models.params import Params
from longctx.serving.engine.core import Core
from longctx.serving.engine.resolve import Resolved
from longctx.serving.recording.header import Header, custom_policy, writable
from longctx.serving.recording.recorder import Recorder


def begin_recording(recorder: Recorder, resolved: Resolved, params: Params | None, core: Core, leads: bool) -> None:
    """Let a recorder record an engine's core.

    Raises:
      ValueError: it records another engine, or this one follows another process.
      OSError: the log can't be written.
    """
    if not leads:
        raise ValueError("recorder must be None but in the first process, which all others follow")
    header = Header(
        model=resolved.model.config,
        model_name=recorder.model_name,
        weights=recorder.weights,
        config=resolved.config,
        custom_policy=custom_policy(resolved.config),
        plan=resolved.plan,
        num_pages=resolved.num_pages,
        max_length=resolved.max_length,
        predictor=writable(resolved.predictor),
        dtype=None if params is None else str(params["embed"].dtype),
        is_private=recorder.is_private,
        topology=resolved.topology,
        created=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
    )
    recorder.begin(header, core)
