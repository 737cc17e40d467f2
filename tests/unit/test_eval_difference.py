"""Differences between two evaluations: fixed and regressed tasks, and how many chance gives."""

from dataclasses import replace
from itertools import permutations
from random import Random
from statistics import fmean

import pytest
import run_samples

from openenv_pipe.errors import UserError
from openenv_pipe.reports.eval_table import Row, eval_tables
from openenv_pipe.reports.report import write_report
from openenv_pipe.runs.eval_difference import compare_reports
from openenv_pipe.runs.evals import Evaluation, save_evaluation
from openenv_pipe.types import Status


@pytest.fixture
def folder(tmp_path):
    return run_samples.create(tmp_path)


def _played():
    return [
        run_samples.episode(Random(0), index, member, False)
        for index in range(4)
        for member in range(2)
    ]


def _summary(folder, label, episodes):
    return run_samples.evaluation(folder, label, episodes).report


def test_fixed_and_regressed_tasks_are_named(folder):
    before, after = _played(), _played()
    for solved, episodes in (({(0, 0), (3, 0)}, before), ({(1, 0), (2, 0), (2, 1)}, after)):
        for episode in episodes:
            episode.success = (episode.task.index, episode.member) in solved
    reports = [_summary(folder, *each) for each in (("start", before), ("trained", after))]
    change = compare_reports(*reports, folder.config_to_run().eval, 0)
    assert [each.task for each in change.fixed] == ["eval/2", "eval/1"]
    assert [(each.task, each.before, each.after) for each in change.regressed] == [
        ("eval/0", 0.5, 0.0),
        ("eval/3", 0.5, 0.0),
    ]
    # With one success of 4 a side is always better. With two of 4 both are equal in 4 of 6 ways.
    assert change.fixed_by_chance == change.regressed_by_chance == pytest.approx(3 / 2 + 1 / 6)
    for report in reports:
        save_evaluation(folder.path, Evaluation(report=report, groups=[]))
    text = write_report(folder).read_text()
    assert "Fixed tasks: 2, 1.7 if divided at random (eval/2, eval/1)." in text
    assert "Regressed tasks: 2, 1.7 if divided at random (eval/0, eval/3)." in text
    rows = [Row(name=each.label, report=each, folder=folder.path) for each in reports]
    table = eval_tables(rows, folder.config_to_run().eval, 0)[-1]
    assert table.rows[0] == ("trained", "fixed", "2", "1.7", "eval/2, eval/1")


@pytest.mark.parametrize("num_before", [1, 2, 5])
@pytest.mark.parametrize("num_solved", [0, 1, 3])
def test_changes_by_chance_are_those_of_all_divisions(folder, num_before, num_solved):
    outcomes = [place < num_solved for place in range(num_before + 3)]
    divisions = list(permutations(outcomes))
    shares = [(fmean(each[:num_before]), fmean(each[num_before:])) for each in divisions]
    expected = fmean(before < after for before, after in shares)
    episodes = [
        run_samples.episode(Random(0), 0, member, solved) for member, solved in enumerate(outcomes)
    ]
    before = _summary(folder, "start", episodes[:num_before])
    after = _summary(folder, "trained", episodes[num_before:])
    change = compare_reports(before, after, folder.config_to_run().eval, 0)
    assert change.fixed_by_chance == pytest.approx(expected)
    assert change.regressed_by_chance == pytest.approx(fmean(b > a for b, a in shares))


def test_means_are_over_the_tasks_that_are_scored_in_both(folder):
    before, after = _played(), _played()
    for episodes, failed in ((before, 0), (after, 3)):
        for episode in episodes:
            episode.success = episode.task.index in (0, 3)
            if episode.task.index == failed:
                episode.status, episode.error = Status.ERROR, "it is gone"
    reports = [_summary(folder, *each) for each in (("start", before), ("trained", after))]
    change = compare_reports(*reports, folder.config_to_run().eval, 0)
    assert change.num_scored_tasks == 2 and change.means["success"] == (0.0, 0.0)
    for name, (first, last) in change.means.items():
        assert last - first == pytest.approx(getattr(change, name).mean)


def test_many_samples_of_a_task_are_compared(folder):
    episodes = [run_samples.episode(Random(0), 0, member, member % 2) for member in range(600)]
    reports = [_summary(folder, label, episodes) for label in ("start", "trained")]
    change = compare_reports(*reports, folder.config_to_run().eval, 0)
    assert 0.4 < change.fixed_by_chance < 0.5
    assert change.fixed_by_chance == pytest.approx(change.regressed_by_chance)


def test_evaluations_against_different_opponents_are_not_compared(folder):
    report = _summary(folder, "start", _played())
    other = report.model_copy(update={"opponent": "perfect"})
    with pytest.raises(UserError, match="different opponents, None and perfect"):
        compare_reports(report, other, folder.config_to_run().eval, 0)
    moved = [each.model_copy(update={"task": "else", "seed": 99}) for each in report.tasks]
    elsewhere = report.model_copy(update={"tasks": moved})
    scored, limited = (
        report.model_copy(update={"measured_with": with_})
        for with_ in ({"env_files.rules.py": "1, not 2"}, {"env.max_turns": "4, not 6"})
    )
    reports = (report, report, other, elsewhere, scored, limited)
    rows = [Row(name=str(n), report=each, folder=folder.path) for n, each in enumerate(reports)]
    (differences,) = eval_tables(rows, folder.config_to_run().eval, 0)[1:]
    reasons = [row[1] for row in differences.rows]
    expected = ["4 of 4", "another opponent", "none in common", "another scoring", "4 of 4"]
    assert reasons == expected
    rows[4] = replace(rows[4], folder=folder.path.parent / "0002")  # measured as the first run
    (differences,) = eval_tables(rows, folder.config_to_run().eval, 0)[1:]
    assert [row[1] for row in differences.rows][3] == "4 of 4"
