"""Whether a step with something more in it keeps the TPOT of those that decode, by prediction."""

from longctx.serving.engine.engine import Engine
from longctx.serving.predictor.work import Work


def keeps_tpot(engine: Engine, start: int, count: int, target: float | None) -> bool:
    """Whether one step of all decodes and of `count` tokens after `start` others is within all TPOT targets.

    False too where there are no targets, or a step has no room for so many tokens.

    Args:
      target: of the request that the tokens are of; None: the engine's own.
    """
    seconds, least = _step(engine, start, count, target)
    return least is not None and seconds is not None and seconds <= least


def breaks_tpot(engine: Engine, length: int, target: float | None) -> bool:
    """Whether a step of all decodes and one more, after `length` tokens, takes longer than one of their TPOT targets.

    One that decodes alone breaks nothing.
    """
    if not engine.scheduler.running.decoding:
        return False
    seconds, least = _step(engine, length, 1, target)
    return least is not None and seconds is not None and seconds > least


def _step(engine: Engine, start: int, count: int, target: float | None) -> tuple[float | None, float | None]:
    """The predicted seconds of such a step, None if it has too many rows; and the least TPOT target of all in it."""
    decoding = tuple(engine.scheduler.running.decoding)
    default = engine.config.slo.per_token(engine.plan.stage).tpot
    asked = (default if target is None else target, *(each.tpot_target for each in decoding))
    least = min((each for each in asked if each is not None), default=None)
    work, ranks = Work.of((each.computed, 1, True) for each in decoding), engine.plan.context
    if ranks > 1:
        work = work._replace(rows=-(-work.rows // ranks), decode_keys=-(-work.decode_keys // ranks))
        work = work.with_sharded(start, count, ranks, samples=True)
    else:
        work = work.with_chunk(start, count, True)
    return None if work.rows > engine.config.token_budget else engine.predictor.seconds(work), least
