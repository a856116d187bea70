"""The papers' figures: each is computed with tiny workloads, and its files are the same every time."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longctx import plotting
from papers.figures import __main__ as program
from papers.figures import registry
from papers.figures.compute import Task, compute, estimate
from papers.figures.figure import Figure, Inputs, Statement, corrected, ordering
from papers.figures.pages import write_pages
from papers.figures.registry import Registered, registered
from papers.figures.results import read_result, write_figure

FIGURES = registered()
# Those that take a second.
SLOW = {*(f"mooncake_figure_{i}" for i in (6, 9, 10, 11)), "mooncake_table_2", "medha_figure_15", "medha_figure_17"}
TOY = Registered("meta", "toy", "figure_1", 1.0)
NUMBER = Statement("1", "TTFT of 1M tokens", 2.0, 1.5, "s", "no host")
ORDERING = ordering("2", "a | b", 1 < 2)


def toy_figure(inputs: Inputs) -> Figure:
    table = [{"tokens": 1000, "seconds": 1 / 3}, {"tokens": 2000, "gpus": None}]
    return Figure("A toy", [NUMBER, ORDERING], table, lambda axes: axes.plot([1, 2], [2, 1]))


class ToyModule:
    """In the place of a module of figures."""

    figure_1 = figure_3 = staticmethod(toy_figure)

    @staticmethod
    def figure_2(inputs: Inputs) -> Figure:
        raise RuntimeError("the second has a fault")


def forget() -> None:
    """Empty the caches of runs that figures share, so that the next figure is computed from nothing."""
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("papers.") else ():
            getattr(value, "cache_clear", lambda: None)()


@pytest.mark.parametrize(
    "figure",
    [pytest.param(x, marks=[pytest.mark.slow] * (x.name in SLOW)) for x in FIGURES],
    ids=[figure.name for figure in FIGURES],
)
def test_every_figure_is_computed(figure: Registered, tmp_path: Path) -> None:
    computed = figure.compute(Inputs(quick=True))
    assert computed.statements or computed.table
    assert computed.title
    assert all(statement.paper and len(statement.why.splitlines()) <= 1 for statement in computed.statements)
    write_figure(figure, computed, tmp_path, is_from_data=False)
    assert len((tmp_path / "simulation" / f"{figure.name}.csv").read_text().splitlines()) == len(computed.table) + 1
    result = read_result(figure, tmp_path)
    assert result is not None
    assert (result.title, result.statements) == (computed.title, computed.statements)


def test_a_figure_is_the_same_when_it_is_computed_again(tmp_path: Path) -> None:
    name = "medha_figure_4"
    [figure] = registered([name])
    for folder in "ab":
        forget()
        write_figure(figure, figure.compute(Inputs(quick=True)), tmp_path / folder, is_from_data=False)
    one, other = ({path.name: path.read_bytes() for path in (tmp_path / at / "simulation").iterdir()} for at in "ab")
    assert one == other
    assert f"{name}.csv" in one


def test_names_of_figures_are_unique() -> None:
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)


def test_figures_load_no_jax() -> None:
    modules = sorted({f"papers.{figure.path}" for figure in FIGURES} | {program.__name__})
    statement = f"import sys, {', '.join(modules)}; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", statement], check=True)


def test_statements_compare_numbers_and_orderings() -> None:
    assert (NUMBER.ratio, NUMBER.is_near, ORDERING.ratio, ORDERING.is_near) == (0.75, False, None, True)
    assert Statement("1", "x", 10, 12).is_near
    assert ordering("1", "x", False).ours == "does not hold"
    for paper, ours in ((1.0, float("nan")), (0.0, 1.0), ("about 3", 3.0), ("holds", 1.0), (1.0, "holds")):
        with pytest.raises(ValueError, match="paper"):
            Statement("1", "x", paper, ours)
    with pytest.raises(ValueError, match="text must say"):
        Statement("1", " ", 1, 1)


def test_a_figure_that_fails_is_named_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "papers.meta.toy", ToyModule)  # type: ignore[arg-type]
    monkeypatch.setattr(
        registry, "PAPERS", {"meta": dict.fromkeys(("toy:figure_1", "toy:figure_2", "toy:figure_3"), 90.0)}
    )
    # In this process, as the toy is in no other.
    monkeypatch.setattr(program, "compute_all", lambda tasks, jobs: compute(*tasks))
    assert program.main(["--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "meta_figure_2 failed:" in captured.err
    assert "the second has a fault" in captured.err
    assert "3 figures: about 4 min of a processor\n" in captured.err  # 270 s
    assert captured.out.startswith("0 of 2 numeric statements are within 20 % of the paper's (0.0%): 0 of 2 that")
    page = (tmp_path / "meta.md").read_text()
    assert "| 1 | TTFT of 1M tokens | 2 s | 1.5 s | 0.75 | no host | `meta_figure_1` |" in page
    assert "| 2 | a \\| b | holds | holds |  |  | `meta_figure_3` |" in page
    assert "meta_figure_2" not in page
    table = (tmp_path / "simulation" / "meta_figure_1.csv").read_text()
    assert table == "tokens,seconds,gpus\n1000,0.333333,\n2000,,\n"
    overview = (tmp_path / "README.md").read_text()
    assert page.splitlines()[-1] not in overview
    assert overview.count("TTFT of 1M tokens") == 2
    # Only one is computed again; the others stay in the pages.
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert program.main(["--out", str(tmp_path), "--only", "meta_figure_3"]) == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert program.main(["--out", str(tmp_path), "--only", "figure_9"]) == 2
    assert "there is no figure, module or paper 'figure_9'" in capsys.readouterr().err


def test_a_module_whose_figures_share_runs_takes_less_than_each_alone(tmp_path: Path) -> None:
    """Figure 16 of Medha is made of the runs of figure 15."""

    def task(*names: str) -> Task:
        return Task(registered([*names]), Inputs(), tmp_path, False)

    one, both = task("medha_figure_16"), task("medha_figure_15", "medha_figure_16")
    assert one.seconds == one.figures[0].seconds
    assert one.seconds <= both.seconds == min(2 * one.seconds, registry.TOGETHER["medha.capacity"])
    assert all(figure.seconds > 0 for figure in FIGURES)


def test_the_time_of_figures_is_said_beforehand(tmp_path: Path) -> None:
    tasks = [Task([TOY._replace(seconds=seconds)], Inputs(), tmp_path, False) for seconds in (600.0, 60.0)]
    assert estimate(tasks[1:], 4) == "1 figure: about 60 s of a processor"
    assert estimate(tasks, 4) == "2 figures: about 11 min of a processor, 10 min or more in 2 processes"
    assert estimate(tasks * 3, 2) == "6 figures: about 33 min of a processor, 16 min or more in 2 processes"


def test_the_share_is_counted_without_corrected_rows_too(tmp_path: Path) -> None:
    near, far = Statement("1", "x", 10, 11), Statement("2", "y", 10, 20, why="z")
    fitted = Statement("3", "w", 1, 1, basis="fitted")
    for statements, said in (
        ([near, far], "Of the predicted ones 1 of 2 (50.0%) are; 1 of 2 (50.0%) without the 0 that"),
        ([*corrected([near]), far, fitted], "1 of 2 (50.0%) are; 0 of 1 (0.0%) without the 1 that"),
    ):
        write_figure(TOY, Figure("A toy", statements, []), tmp_path, is_from_data=False)
        result = read_result(TOY, tmp_path)
        assert result is not None
        write_pages({"meta": [result]}, tmp_path)
        assert said in (tmp_path / "README.md").read_text()


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    figure = toy_figure(Inputs())
    write_figure(TOY, figure, tmp_path, is_from_data=True, png=True)
    result = read_result(TOY, tmp_path)
    assert result is not None
    assert (result.title, result.statements, result.is_from_data) == ("A toy", figure.statements, True)
    assert result.has_drawing == plotting.can_draw()


def test_pages_name_figures_of_earlier_tables(tmp_path: Path) -> None:
    write_figure(TOY, toy_figure(Inputs()), tmp_path, is_from_data=True)
    result = read_result(TOY, tmp_path)
    assert result is not None
    for tables, is_said in ((result.tables, False), ("", True), ("0" * 12, True)):
        write_pages({"meta": [dataclasses.replace(result, tables=tables)]}, tmp_path)
        for page in ("README.md", "meta.md"):
            assert ("and not yet again: `meta_figure_1`. To" in (tmp_path / page).read_text()) == is_said


def test_inputs_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data must be a folder"):
        Inputs(data=tmp_path / "absent")
    with pytest.raises(ValueError, match="seed must be an integer of at least 0"):
        Inputs(seed=-1)
    (tmp_path / "a.csv").write_text("")
    assert Inputs(data=tmp_path).file("a.csv") == tmp_path / "a.csv"
    assert Inputs(data=tmp_path).file("b.csv") is None
    assert Inputs().file("a.csv") is None


def test_figures_are_computed_in_processes(tmp_path: Path) -> None:
    """As `make figures` does: processes import what they compute by themselves."""
    figure = min(FIGURES, key=lambda figure: figure.name != "meta_table_2")
    arguments = ["--quick", "--jobs", "2", "--only", figure.name, "--out", str(tmp_path)]
    command = [sys.executable, "-m", program.__spec__.name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("numeric statements are within 20 %") == 1
    assert read_result(figure, tmp_path) is not None
    assert figure.name in (tmp_path / f"{figure.paper}.md").read_text()


@pytest.mark.slow
def test_all_figures_are_byte_equal_in_other_processes(tmp_path: Path) -> None:
    """Nothing depends on the order of sets, on what was cached before, or on which process computes what."""
    written = []
    for jobs in ("1", "2"):
        folder, environment = tmp_path / jobs, os.environ | {"PYTHONHASHSEED": jobs}
        command = [sys.executable, "-m", program.__spec__.name, "--quick", "--jobs", jobs, "--out", str(folder)]
        subprocess.run(command, capture_output=True, timeout=900, check=True, env=environment)
        written.append({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    one, other = written
    assert len(one) > 2 * len(FIGURES)
    assert one.keys() == other.keys()
    assert [name for name, contents in one.items() if contents != other[name]] == []
