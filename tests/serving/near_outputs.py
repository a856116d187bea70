"""Outputs that agree but for rounding: with FP8 pages a last bit of a key may be a step of 1/8 of it.

Sums in another order, as of another plan or other chunks, may round a key to the neighbouring e4m3 value. So two plans
may differ by as much as FP8 pages differ from others, and are compared within that.
"""

from collections.abc import Sequence

from longctx.serving import Output

LOGPROBS = 5
"""That requests have to ask for."""
FP8_ERROR = 0.5
"""How far FP8 pages may move a log probability of the small random models of these tests."""


def check_near(found: Sequence[Output], wanted: Sequence[Output]) -> None:
    """Greedy outputs are the same up to a token that is within rounding; most of them are to the end."""
    same = 0
    for one, other in zip(found, wanted, strict=True):
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
        at = next((i for i, (a, b) in pairs if a != b), None)
        same += at is None
        assert one.logprobs is not None
        assert other.logprobs is not None
        for a, b in zip(one.logprobs[:at], other.logprobs[:at], strict=True):
            assert abs(a.logprob - b.logprob) < FP8_ERROR
        if at is not None:
            top = dict(other.logprobs[at].top)
            assert top[other.token_ids[at]] - top[one.token_ids[at]] < FP8_ERROR
    assert same > len(wanted) / 2
