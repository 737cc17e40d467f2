"""Tables on narrow terminals, and in files."""

import sys
from dataclasses import replace
from io import StringIO
from random import Random

import pytest
import run_samples
from fakes import run_config
from rich.console import Console

from openenv_pipe.cli.console import print_table
from openenv_pipe.reports.eval_table import Row, eval_tables
from openenv_pipe.runs.evals import read_stages
from openenv_pipe.system.tables import Column, Fit, Table

CELLS = ("echo/0001@0040", "0.123 (0.01..0.45)", "-12.5 (-14.25..-11.75)", "a model" * 9, "7 of 8")


def make_table() -> Table:
    table = Table(
        Column("eval"),
        Column("success"),
        Column("reward", 1),
        Column("model", 3, Fit.FOLD),
        Column("failed", 2),
    )
    table.add_row(*CELLS)
    table.add_row("start", *("–" for _ in CELLS[1:]))
    return table


def shown(table, width):
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(table, crop=False)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [36, 45, 60, 80, 100, 200])
def test_a_narrow_terminal_gets_fewer_columns_and_whole_numbers(width):
    text = shown(make_table(), width)
    table, _, left_out = text.partition("left out at this width:")
    for title, cell in zip(("success", "reward", "failed"), CELLS[1:3] + CELLS[4:], strict=True):
        assert (cell in table) == (title in table)
        assert (title in table) != (title in left_out.replace("\n", ""))
    assert CELLS[0] in table and CELLS[1] in table
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [1, 20])
def test_the_last_columns_stay_whole_on_any_terminal(width):
    text = shown(make_table(), width)
    assert CELLS[0] in text and CELLS[1] in text and CELLS[2] not in text


def test_columns_are_dropped_by_their_rank():
    kept = {90: "reward model failed", 70: "reward failed", 60: "reward", 40: ""}
    for width, titles in kept.items():
        heading = shown(make_table(), width).splitlines()[0].split()
        assert heading == ["eval", "success", *titles.split()]


def test_a_long_text_is_cut_or_goes_on_in_further_lines():
    table = Table(Column("run"), Column("cause", fit=Fit.CUT), Column("notes", fit=Fit.FOLD))
    table.add_row("echo/0001", "c" * 90, "n" * 90)
    text = shown(table, 60)
    assert "…" in text and text.count("n") == len("run") - 2 + len("notes") - 4 + 90
    assert max(map(len, text.splitlines())) <= 60


def test_the_tables_of_evaluations_fit_eighty_columns(tmp_path):
    folder = run_samples.create(tmp_path)
    run_samples.evaluate(folder, "start", 0.2)
    run_samples.evaluate(folder, "trained", 0.6)
    reports, path = read_stages(folder.path), folder.path
    rows = [Row(name=f"smoke/0001@{n}", report=r, folder=path) for n, r in reports.items()]
    config = run_config()
    texts = [shown(table, 80) for table in eval_tables(rows, config.eval, config.seed)]
    for text in texts:
        assert "…" not in text and max(map(len, text.splitlines())) <= 80
    scores, differences, changed = texts
    assert scores.count("..") >= 2 and differences.count("..") >= 2  # intervals
    assert "fixed" in changed and "regressed" not in changed, "a row without tasks says nothing"


def test_a_table_shows_success_by_label(tmp_path):
    folder = run_samples.create(tmp_path)
    reports = []
    for label, num_solved in (("start", 1), ("trained", 3)):
        episodes = [run_samples.episode(Random(0), n, 0, n < num_solved) for n in range(4)]
        for each in episodes:
            each.task = replace(each.task, labels={"tier": str(each.task.index // 2)})
        reports.append(run_samples.evaluation(folder, label, episodes).report)
    rows = [Row(name=each.label, report=each, folder=folder.path) for each in reports]
    config = run_config()
    table = next(t for t in eval_tables(rows, config.eval, 0) if t.title == "\nSuccess by tier")
    lines = [line.split() for line in shown(table, 100).splitlines()]
    assert ["tier", "tasks", "start", "trained"] in lines
    assert [line[:3] for line in lines[-2:]] == [["0", "2", "0.500"], ["1", "2", "0.000"]]


def test_a_file_gets_whole_lines_unless_columns_says_otherwise(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert not sys.stdout.isatty()
    print_table(make_table())
    text = capsys.readouterr().out
    assert all(cell in text for cell in CELLS)
    monkeypatch.setenv("COLUMNS", "60")
    print_table(make_table())
    text = capsys.readouterr().out
    assert "left out at this width: model, failed" in text
    assert max(map(len, text.splitlines())) <= 60
