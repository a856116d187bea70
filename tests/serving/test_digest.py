"""Digests of decisions: the same everywhere, and another for every other decision."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from longctx.serving.distributed.digest import DecisionDigest, describe, plan_bytes
from longctx.serving.scheduler.batch import Batch, Chunk, Exchange, TableRun

SMALL = st.integers(0, 3)
CHUNKS = st.lists(
    st.builds(
        lambda slot, start, count, samples, ranks, sharded: Chunk(
            None,  # type: ignore[arg-type]
            slot,
            start,
            count,
            samples,
            False,
            tuple(ranks),
            sharded,
        ),
        SMALL,
        SMALL,
        SMALL,
        st.booleans(),
        st.lists(SMALL, min_size=1, max_size=3),
        st.booleans(),
    ),
    max_size=3,
)
PAGES = st.lists(SMALL, max_size=3)
TABLES = st.lists(st.builds(TableRun, SMALL, SMALL, PAGES, PAGES), max_size=2)
EXCHANGES = st.sampled_from([None, *(Exchange(name, "for a reason") for name in ("kvp", "pass_kv", "pass_q"))])
BATCHES = st.builds(Batch, SMALL, CHUNKS, TABLES, exchange=EXCHANGES)


def decision(batch: Batch) -> Any:
    """What a batch decides: a decode's row is not another than a prompt's last."""
    chunks = [chunk._replace(decodes=False) for chunk in batch.chunks]
    return batch.index, chunks, batch.tables, batch.exchange


@given(BATCHES, BATCHES)
def test_no_two_decisions_have_the_same_bytes(one: Batch, other: Batch) -> None:
    assert (plan_bytes(one) == plan_bytes(other)) == (decision(one) == decision(other))


@given(BATCHES)
def test_plans_are_described(batch: Batch) -> None:
    text = describe(batch)
    assert text.startswith(f"  step {batch.index} computes ")
    for chunk in batch.chunks:
        assert f"slot {chunk.slot}: {chunk.num_tokens} from {chunk.start} on ranks {list(chunk.ranks)}" in text
    tables = f"; tables {[(run.slot, run.first, *run.pages, *run.windows) for run in batch.tables]}"
    assert text.endswith(tables if batch.exchange is None else f"{tables}; {batch.exchange.name}")


def test_digests_are_the_same_in_every_process_and_version() -> None:
    """Logs of one version are replayed by others."""
    digest = DecisionDigest()
    chunk = Chunk(None, 2, 100_000, 1, True, True, (0, 1), False)  # type: ignore[arg-type]
    digest.add_plan(Batch(5, [chunk, chunk._replace(slot=3)], [TableRun(2, 7, [4, 5])]))
    digest.add_tokens(Batch(5), [17, -1])
    assert digest.digest.hex() == "d4abf3d6e2bb1fbc"
