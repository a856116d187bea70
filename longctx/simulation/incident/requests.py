"""The requests of a log with the tokens that they got."""

import numpy as np

from longctx.serving.predictor.runtime import Predictor
from longctx.serving.recording.contents import RecordedRequest, request_of
from longctx.serving.recording.reader import RecordedLog
from longctx.serving.recording.records import Arrived
from longctx.serving.scheduler.policy import Policy
from longctx.simulation.incident.replayer import Replayer


def recorded_requests(
    log: RecordedLog, predictor: Predictor | None = None, policy: Policy | None = None
) -> list[RecordedRequest]:
    """All requests of a log that is not private, in order of arrival.

    Args:
      predictor, policy: see `Rebuilt`.

    Raises:
      Differs: the replay, which says whose tokens they are, decides otherwise than was recorded.
    """
    tokens: dict[int, list[int]] = {}
    for moment in Replayer(log, predictor, policy).run():
        if moment.ended is not None and moment.tokens is not None:
            samples = np.frombuffer(moment.tokens, "<i4").tolist()
            for sequence, token in zip(moment.ended.batch.sampled, samples, strict=True):
                completion = sequence.completion
                assert completion is not None
                # A sequence that has ended may be sampled once more in steps that were in flight.
                mine = tokens.setdefault(sequence.order, [])
                if len(mine) < completion.num_known - completion.num_prompt:
                    mine.append(token)
    requests, order = [], 0
    for record in log.records():
        if isinstance(record, Arrived) and record.content is not None:
            orders = range(order, order + record.num_completions)
            order = orders.stop
            request = request_of(record.content, record.request_id)
            requests.append(RecordedRequest(request, [tokens.get(i, []) for i in orders]))
    return requests
