"""Predictions to be tested on hardware: the page has what is predicted, and the command takes its flags."""

from pathlib import Path

from longctx.cli import parse
from papers import predictions

PAGE = Path(__file__).parents[2] / "docs" / "results" / "predictions.md"


def test_the_page_has_the_predictions() -> None:
    planned = predictions.predict("llama-3-8b", 8, 131_072)
    assert planned is not None
    prompt = planned.prompt
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith("| llama-3-8b | 8 | 131,072 |"))
    assert f"| {prompt.ttft:.3g} s (" in row
    assert f"| {1e3 * prompt.tpot:.3g} ms (" in row
    assert f"`{predictions.flags(planned)}`" in row


def test_the_command_takes_the_flags_of_each_row() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| llama")]
    assert len(rows) > 24
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        flags = cells[-1].strip("`").split()
        tokens = cells[2].replace(",", "")
        _, options = parse(["bench", "--requests", "1", "--prompt-tokens", tokens, "--output-tokens", "256", *flags])
        sizes = " x ".join(str(getattr(options, axis)) for axis in ("stage", "context", "tensor"))
        assert sizes == cells[3]


def test_more_than_the_memory_has_no_plan() -> None:
    assert predictions.predict("llama-3-405b", 1, 8_192) is None
