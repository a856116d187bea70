"""The pages of results, in Markdown: one for each paper, and one with the whole table."""

from pathlib import Path

from papers.figures.figure import CORRECTED_SINCE, Statement
from papers.figures.registry import TITLES, in_words, registered, seconds_of
from papers.figures.results import FILES, Result, tables_digest

COMMAND = "python -m papers.figures"
_HEAD = "| figure | statement | paper | ours | ratio | why they differ | command |\n|---|---|---|---|---|---|---|"
_BASES = {
    "predicted": "that are predicted",
    "arithmetic": "that follow from sizes alone",
    "fitted": "that the cost model was fitted to",
}
_ABOUT_ROWS = (
    f"A row's figure is computed by `{COMMAND} --only NAME`, NAME as in the last column. A ratio is ours over the "
    "paper's. Where they differ by more than 20 %, the row says why. Where it says *arithmetic*, ours follows from "
    "sizes and settings alone; where it says *fitted*, a number of the cost model was taken from that measurement."
)
_LIMITS = """\
## What a simulation can and cannot show

The scheduler, the page pool, the placement and the plans here are the code that serves: where requests are served in
virtual time, what they decide, and in which order, is not modelled but run. Not every row is such a run: Meta's tables
2, 4, 5 and 8 and figure 9, Mooncake's figures 2 and 5, and rows that are marked *arithmetic*, evaluate the cost model
for one step or one layer, with no scheduler. In runs, orderings of policies, where one plan overtakes another, how a
queue grows, and what a chunk or a rank's share comes to are found, as far as the seconds of steps are right. Those are
predicted: from operations and bytes, data sheets, and the shares of these that are reached, which were fitted once, for
all models and plans, on half of the measured operators of other engines
([simulation_hardware.md](../simulation_hardware.md) has the errors on the other half). Meta's GPUs and network are
known from that paper's own micro-measurements (attention, SendRecv and All2All of its tables 5 and 8, appendix A's
FLOP/s, and what transfers take from attention, at two rows of table 4): those rows show that the model agrees with
itself, not that it predicts, and are counted apart. A simulation cannot show that a kernel reaches a share, that two
transfers leave each other alone, what a host adds that is late, clocks that fall with heat, or failures; and it knows
of a paper's setting only what the paper says: neither its requests nor its kernels were published. So ratios between
two settings are worth more than seconds, orderings more than ratios, and all of them less than one measurement on the
devices themselves."""
_INDEPENDENT_TITLE = "## Which statements are predicted from independent measurements"
_INDEPENDENT = """\
No number of the cost model is from Mnemosyne, Medha or Mooncake, so all their rows that are neither *arithmetic* nor
*fitted* are predictions from what others measured:"""
_SOURCES = {
    "mnemosyne": """\
Products, decodes and all-reduces within a host are as AIConfigurator's tables have them of H100, hops between hosts as
Meta's paper. Attention of prompts reaches 35 %, by the abstract of FlashAttention-3, which says it of the kernels
before it; this was looked for after 59 % had turned out 1.7 times too fast, so TTFTs are not quite independent. With
FlashAttention 3, which the tables have (68 %), attention would take half as long.""",
    "medha": """\
Products, attention and all-reduces are by AIConfigurator's tables of A100, and hops between hosts by Vidur's of A100:
none is from this paper. So all rows of figures 1, 4, 15, 16 and 21 to 23 are predictions from independent measurements.
Figures 17 and 18 have Mnemosyne's H100, whose attention of prompts reaches 35 %; that was looked for with Mnemosyne's
TTFTs known, not Medha's. Hops between these hosts are as Meta's paper has them.""",
    "meta": """\
Products, in-host all-reduces, norms and decodes' keys are independent measurements, of H100 of 700 W scaled by data
sheets to these of 500 W. Attention's FLOP/s, RDMA's rates and contention are this paper's own. So TTIT of tensor
parallelism (tables 6 and 7: TP8 to TP32) is predicted from independent measurements, and its TTFT but for attention's
FLOP/s and RDMA's rate. TTFT and TTIT of context parallelism (figures 6, 8 and 9, tables 4, 6 and 7) and the parts of
table 8 are predicted from parts that the paper measured one by one: they test how these are put together.""",
    "mooncake": """\
Products and attention are as AIConfigurator's tables have them of A100, an A800's NVLink is at the share that an A100's
reaches by Vidur's, the network at the share of Meta's RDMA: none is from this paper. So all rows but those that are
*arithmetic* are predictions from independent measurements.""",
}


def write_pages(results: dict[str, list[Result]], out: Path) -> None:
    """Write `README.md` and a page for each paper that has results.

    Args:
      results: figures by paper, each in its paper's order.

    Raises:
      OSError: a file can't be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    for paper, figures in results.items():
        if figures:
            (out / f"{paper}.md").write_text(_page(paper, figures), encoding="utf-8")
    (out / "README.md").write_text(_overview(results, _others(out, results)), encoding="utf-8")


def count(statements: list[Statement]) -> str:
    """Count the numbers that are near those of the papers, by the basis of ours, and the orderings that hold."""
    numbers = [s for s in statements if s.ratio is not None]
    share = f" ({sum(s.is_near for s in numbers) / len(numbers):.1%})" if numbers else ""
    kinds = [f"{_near([s for s in numbers if s.basis == basis])} {about}" for basis, about in _BASES.items()]
    kinds = [kind for kind in kinds if not kind.startswith("0 of 0")]
    orderings = [s for s in statements if s.ratio is None]
    return (
        f"{_near(numbers)} numeric statements are within 20 % of the paper's{share}"
        f"{': ' * bool(kinds)}{', '.join(kinds)}; {_near(orderings)} orderings and crossovers hold"
    )


def _without_corrected(statements: list[Statement]) -> str:
    """Compare the share of the predicted rows with that without rows corrected after their values were known."""
    predicted = [s for s in statements if s.ratio is not None and s.basis == "predicted"]
    kept = [s for s in predicted if not s.is_corrected]
    if not kept:
        return ""
    shares = [f"{_near(each)} ({sum(s.is_near for s in each) / len(each):.1%})" for each in (predicted, kept)]
    return (
        f"Of the predicted ones {shares[0]} are; {shares[1]} without the {len(predicted) - len(kept)} that were added, "
        f"or whose setting or model was changed, since commit {CORRECTED_SINCE}, when the values of both were known."
    )


def _near(statements: list[Statement]) -> str:
    return f"{sum(s.is_near for s in statements)} of {len(statements)}"


def _page(paper: str, figures: list[Result]) -> str:
    statements = [s for figure in figures for s in figure.statements]
    about = f"In virtual time, beside the paper's own values. {count(statements)}."
    parts = [f"# {TITLES[paper]}", about, *_of_earlier_tables(figures), _INDEPENDENT_TITLE, _SOURCES[paper]]
    parts += ["## Statements", _ABOUT_ROWS]
    parts.append("\n".join([_HEAD, *(_row(figure, s) for figure in figures for s in figure.statements)]))
    for figure in figures:
        files = f"{FILES}/{figure.name}"
        parts.append(f"## {figure.title}")
        parts.append(f"```sh not-run: takes up to minutes\n{COMMAND} --only {figure.name}\n```")
        if figure.has_drawing:
            parts.append(f"![{figure.title}]({files}.svg)")
        parts.append(f"Values: [{figure.name}.csv]({files}.csv).")
    return "\n\n".join(parts) + "\n"


def _overview(results: dict[str, list[Result]], others: list[str]) -> str:
    everything = [figure for figures in results.values() for figure in figures]
    statements = [s for figure in everything for s in figure.statements]
    workloads = "files of measured workloads" if any(f.is_from_data for f in everything) else "the built-in workloads"
    parts = [
        "# Results",
        "Figures of the papers, computed in virtual time by the code that serves (`longctx.simulation`), beside the "
        f"papers' own values; from {workloads}. `make figures` computes all of them, and writes these pages.",
        f"**{count(statements)}.** {_without_corrected(statements)}",
        "\n".join(f"- [{TITLES[paper]}]({paper}.md): {count([s for f in figures for s in f.statements])}."
                  for paper, figures in results.items() if figures),
    ]  # fmt: skip
    parts += _of_earlier_tables(everything)
    if others:
        parts.append("Other pages: " + ", ".join(f"[{name}]({name})" for name in others) + ".")
    sources = [f"- {paper.capitalize()}.\n{text}".replace("\n", "\n  ") for paper, text in _SOURCES.items()]
    parts += [_LIMITS, _INDEPENDENT_TITLE, _INDEPENDENT, "\n".join(sources), "## All statements", _ABOUT_ROWS]
    for paper, figures in results.items():
        if figures:
            rows = [_row(figure, s) for figure in figures for s in figure.statements]
            parts.append("\n".join([f"### {paper.capitalize()}", "", _HEAD, *rows]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _of_earlier_tables(figures: list[Result]) -> list[str]:
    """Say which figures were computed by other tables of devices than those that are there now."""
    names = [figure.name for figure in figures if figure.tables != tables_digest()]
    if not names:
        return []
    seconds = in_words(seconds_of([figure for figure in registered() if figure.name in names]))
    said = ", ".join(f"`{name}`" for name in names)
    return [
        f"Computed by earlier tables of devices and operators, and not yet again: {said}. To compute them again takes "
        f"about {seconds} of a processor; until then their values and explanations are those of the earlier tables."
    ]


def _others(out: Path, results: dict[str, list[Result]]) -> list[str]:
    """Pages beside these, which other programs wrote."""
    return sorted(path.name for path in out.glob("*.md") if path.stem not in {*results, "README"})


def _row(figure: Result, statement: Statement) -> str:
    ratio = "" if statement.ratio is None else f"{statement.ratio:.2f}"
    if statement.basis != "predicted":
        ratio += f" ({statement.basis})"
    why = statement.why or ("" if statement.is_near else "not explained")
    cells = [statement.figure, statement.text, _value(statement.paper, statement.unit)]
    cells += [_value(statement.ours, statement.unit), ratio, why, f"`{figure.name}`"]
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def _value(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    number = f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"
    return f"{number} {unit}".rstrip()
