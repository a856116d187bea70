"""The table of predictions in docs/parallel_plans.md is what `python -m papers.helix` prints."""

from pathlib import Path

from papers import helix

PAGE = Path(__file__).parents[2] / "docs" / "parallel_plans.md"


def test_the_page_has_the_predictions() -> None:
    rows = [f"| {' | '.join(cells)} |" for cells in helix.table()]
    assert "\n".join(rows) in PAGE.read_text(encoding="utf-8")


def test_helix_fits_as_many_requests_as_other_meshes_of_ranks() -> None:
    """Weights that are not repeated leave room for keys, on every mesh of the table."""
    for name, gpus, topology in helix.CASES:
        kinds = helix.kinds(gpus)
        for plain, shared in zip(kinds["KVP"], kinds["Helix"], strict=True):
            rows = [helix.row(helix.MODELS[name], helix.Topology.preset(topology), plan) for plan in (plain, shared)]
            assert rows[1].weights < rows[0].weights
            assert rows[1].fits >= rows[0].fits
