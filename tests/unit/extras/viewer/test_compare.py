"""`compare`: which settings differ, the results, and each output format."""

import csv
import io
import json
import shutil

import pytest
import run_samples
import typer

import openenv_pipe
from openenv_pipe import Run
from openenv_pipe.cli.completion import complete_run, complete_subject
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.viewer import cli
from openenv_pipe.extras.viewer.compare.grouping import compare_settings
from openenv_pipe.extras.viewer.compare.load import find_runs
from openenv_pipe.runs.folder import RunFolder

pytestmark = pytest.mark.slow

STAMP = "2026-11-20_14-03-11"


def make(runs_dir, lr=1e-5, seed=0, success=None, sweep=None, success_reward=1.0):
    """Create a run of two steps; with `success`, it is finished and evaluated."""
    config = run_samples.config(runs_dir)
    optimizer = config.trainer.optimizer.model_copy(update={"lr": lr})
    changes = {
        "seed": seed,
        "model": config.model.model_copy(update={"seed": seed}),
        "trainer": config.trainer.model_copy(update={"optimizer": optimizer}),
        "env": config.env.model_copy(update={"success_reward": success_reward}),
    }
    config = config.model_copy(update=changes)
    folder = RunFolder.create(config, overrides=[], command=["openenv-pipe"], sweep=sweep)
    run_samples.train(folder)
    run_samples.evaluate(folder, "start", 0.0)
    if success is not None:
        run_samples.evaluate(folder, "trained", success, step=2)
        folder.finish("finished")
    return folder


def compared(*folders):
    return compare_settings(find_runs([str(folder.path) for folder in folders]))


def shown(capsys, form, *folders):
    cli.compare([str(folder.path) for folder in folders], form)
    return capsys.readouterr().out


def test_python_gets_the_comparison_that_the_command_prints(tmp_path, capsys):
    runs = [make(tmp_path, lr, success=rate) for lr, rate in ((1e-5, 0.2), (1e-4, 0.9))]
    result = openenv_pipe.compare(Run(runs[0].path), runs[1].record.id, runs_dir=tmp_path)
    assert [setting.values["trainer.optimizer.lr"] for setting in result.settings] == [1e-4, 1e-5]
    assert str(result) == result._repr_markdown_() == shown(capsys, "md", *runs)
    better, worse, verdict = repr(result).splitlines()
    assert better.startswith("optimizer.lr=0.0001 (smoke/0002, 1 finished): success 90% [")
    assert worse.startswith("optimizer.lr=1e-05 (smoke/0001, 1 finished): success 20% [")
    assert verdict.startswith("best: smoke/0002") and len(repr(result.settings)) < 2500
    frame = result.to_pandas()
    assert frame["trainer.optimizer.lr"].tolist() == [1e-4, 1e-5]
    assert frame["success"].tolist() == [0.9, 0.2] and frame["runs"][0] == "smoke/0002"
    (header, *_) = csv.reader(io.StringIO(shown(capsys, "csv", *runs)))
    assert [*frame] == header
    with pytest.raises(RunFolderError, match="no folder"):
        openenv_pipe.compare("nothing/0001", runs_dir=tmp_path)


def test_runs_that_differ_in_their_seed_are_one_with_an_interval_over_seeds(tmp_path):
    runs = [make(tmp_path, 1e-5, seed, rate) for seed, rate in enumerate((0.2, 0.3, 0.1))]
    runs += [make(tmp_path, 1e-4, seed, rate) for seed, rate in enumerate((0.8, 0.9, 0.7))]
    result = compared(*runs)
    assert result.keys == ["trainer.optimizer.lr"]
    names = [setting.name for setting in result.settings]
    assert names == ["optimizer.lr=0.0001", "optimizer.lr=1e-05"]
    success = result.settings[0].figures["success"]
    # Student's t with two degrees of freedom; the three values have a standard deviation of 0.1
    half = 4.303 * 0.1 / 3**0.5
    assert success.mean == pytest.approx(0.8) and success.over == "seeds"
    assert (success.low, success.high) == (pytest.approx(0.8 - half, abs=1e-4), 1.0)  # clipped to 1
    assert result.best is result.settings[0]
    assert result.best_run.id == "smoke/0005"
    assert result.not_told_apart == []


def test_keys_of_the_trainer_come_first_and_those_without_an_effect_not_at_all(tmp_path):
    changes = (
        ["env.max_turns=4", "trainer.optimizer.lr=5e-3"],
        [
            "trainer.warm_start.optimizer.lr=0.5",
            "trainer.loss.kl.estimator=k2",
            "model.template_time='2026-01-01T00:00:00'",
        ],
    )
    base = ["conf=smoke", f"runs_dir={tmp_path}", "trainer.warm_start.steps=0"]
    runs = [run_samples.create(tmp_path, compose([*base, *each]).config) for each in changes]
    assert compared(*runs).keys == ["trainer.optimizer.lr", "env.max_turns"]


def test_a_run_whose_configuration_is_invalid_is_listed_with_the_key(tmp_path):
    other, new = make(tmp_path, seed=0, success=0.2), make(tmp_path, seed=1, success=0.4)
    config = json.loads((other.path / "config.json").read_text())
    config["reward"] = {"terms": None, "later": True}
    (other.path / "config.json").write_text(json.dumps(config))
    result = compared(other, new)
    (unreadable,) = result.unreadable
    assert len(result.settings) == 1 and "reward.later" in unreadable.cause


def test_a_seed_that_was_run_twice_counts_once(tmp_path):
    runs = [make(tmp_path, success=0.2), make(tmp_path, success=0.6), make(tmp_path, seed=1)]
    (setting,) = compared(*runs).settings
    assert [run.id for run in setting.counted] == ["smoke/0002"]
    assert (setting.figures["success"].mean, setting.figures["success"].over) == (0.6, "tasks")


def reproduction(of, num_steps=2):
    """Run it again for as many steps, as `reproduce --steps`; it ends without a result."""
    folder = RunFolder.create(
        of.written_config, overrides=[], command=[], lineage=of.lineage("reproduction")
    )
    run_samples.train(folder, num_steps)
    run_samples.evaluate(folder, "start", 0.0)
    folder.finish("finished")
    return folder


@pytest.mark.parametrize("status", ["running", "failed", "finished"])
def test_the_evaluation_before_a_run_was_extended_is_not_its_result(tmp_path, status):
    folder = make(tmp_path)
    run_samples.evaluate(folder, "trained", 0.2, step=2)
    (run,) = find_runs([str(folder.path)]).runs
    assert run.final.success.mean == pytest.approx(0.2)
    run_samples.append(folder, run_samples.record(3))
    if status != "running":
        folder.finish(status)
    (run,) = find_runs([str(folder.path)]).runs
    assert run.final is None and 2 in [report.step for report in run.reports]
    run_samples.evaluate(folder, "trained", 0.9, step=3)
    (run,) = find_runs([str(folder.path)]).runs
    assert run.final.success.mean == pytest.approx(0.9)


def test_a_reproduction_replaces_no_result(tmp_path, capsys):
    trained = make(tmp_path, success=0.9)
    short, again = reproduction(trained, 1), reproduction(trained)
    runs = [str(each.path) for each in (trained, short, again)]
    cli.compare(runs, fail_under=["success=0.85"])
    out = capsys.readouterr().out
    assert "best: smoke/0001: success 90%" in out
    assert "smoke/0002 is left out: it is a reproduction of smoke/0001" in out
    (setting,) = compared(trained, short).settings
    assert [run.id for run in setting.runs] == ["smoke/0001"]


def test_what_was_measured_before_training_is_not_the_result_of_a_run(tmp_path):
    short = reproduction(make(tmp_path, success=0.9), 1)
    assert compared(short).settings[0].figures.get("success") is None
    run_samples.evaluate(short, "untrained", 0.0)
    run_samples.evaluate(short, "step_000001", 0.3, step=1)
    assert compared(short).settings[0].figures["success"].mean == 0.3


def test_runs_of_unlike_length_are_not_seeds_of_one_setting(tmp_path):
    trained = make(tmp_path, success=0.9)
    short, whole = reproduction(trained, 1), reproduction(trained)
    result = compared(short, whole)
    assert result.keys == ["trainer.steps"]
    names = sorted(setting.name for setting in result.settings)
    assert names == ["trainer.steps=1", "trainer.steps=2"]


def test_two_single_runs_are_told_apart_by_their_tasks(tmp_path):
    best, near, far = (make(tmp_path, lr, 0, r) for lr, r in ((1, 0.9), (2, 0.8), (3, 0.1)))
    result = compared(far, near, best)
    found = [setting.runs[0].id for setting in result.settings]
    assert found == [each.record.id for each in (best, near, far)]
    assert [setting.runs[0].id for setting in result.not_told_apart] == [near.record.id]


def test_runs_that_failed_or_still_run_are_shown_and_not_counted(tmp_path, capsys):
    done, failed, running, broken = (make(tmp_path, seed=seed) for seed in range(4))
    run_samples.evaluate(done, "trained", 0.5, step=2)
    done.finish("finished")
    failed.finish("failed", cause="HostError: it died\nits log")
    (broken.path / "config.json").write_text("{")
    result = compared(done, failed, running, broken)
    (setting,) = result.settings
    assert setting.statuses == "1 finished, 1 failed, 1 running"
    assert (setting.figures["success"].mean, setting.figures["success"].over) == (0.5, "tasks")
    out = shown(capsys, "table", done, failed, running, broken)
    assert "smoke/0002 failed at step 2 of 2: HostError: it died\n" in out
    assert "smoke/0003 running at step 2 of 2\n" in out
    assert "smoke/0004 unreadable" in out


def test_a_setting_below_a_threshold_and_a_run_without_an_end_are_failures(tmp_path, capsys):
    good = [make(tmp_path, 1e-4, seed, success=0.9) for seed in (0, 1)]
    cli.compare([str(each.path) for each in good], fail_under=["success=0.85"])
    low, running = make(tmp_path, success=0.8), make(tmp_path, 1e-3)
    names = [str(each.path) for each in (*good, low, running)]
    junit = tmp_path / "junit.xml"
    with pytest.raises(typer.Exit) as ended:
        cli.compare(names, fail_under=["success=0.85"], junit=junit)
    assert ended.value.exit_code == 3
    told = capsys.readouterr().out
    assert "FAIL smoke/0003: success 0.800 < 0.85\n" in told
    assert "FAIL smoke/0004: success was not measured" in told
    with pytest.raises(typer.Exit):
        cli.compare(names, form="json", fail_under=["success=0.85"])
    told = capsys.readouterr()
    assert json.loads(told.out) and "FAIL smoke/0003: success 0.800 < 0.85\n" in told.err
    written = junit.read_text()
    assert 'tests="3" failures="2"' in written and written.count(' time="') == 3


def test_a_row_that_lacks_a_seed_is_a_failure_and_names_it(tmp_path, capsys):
    good, other = (make(tmp_path, seed=seed, success=0.9) for seed in (0, 1))
    runs = [str(each.path) for each in (good, other)]
    cli.compare(runs, fail_under=["success=0.85"])
    assert "success 90% [14, 98] over its seeds" in capsys.readouterr().out
    shutil.rmtree(other.path / "eval")
    with pytest.raises(typer.Exit):
        cli.compare(runs, fail_under=["success=0.85"])
    expected = "FAIL smoke/0001 0002: success 0.900 >= 0.85, but without smoke/0002, not evaluated"
    assert expected in capsys.readouterr().out


def test_a_finished_run_whose_metrics_have_lost_their_end_is_named(tmp_path, capsys):
    run = make(tmp_path, success=0.9)
    assert "damaged" not in shown(capsys, "table", run)
    lines = run.metrics_path.read_text().splitlines(keepends=True)
    run.metrics_path.write_text("".join(lines[:-1]))
    assert "smoke/0001 has finished, and its metrics.jsonl ends at step 1 of 2" in (
        " ".join(shown(capsys, "table", run).split())
    )


def test_a_row_with_too_few_scored_tasks_is_a_failure(tmp_path, capsys):
    run = make(tmp_path)
    run_samples.evaluate(run, "trained", 1.0, step=2, num_failed=8)
    run.finish("finished")
    with pytest.raises(typer.Exit):
        cli.compare([str(run.path)], fail_under=["success=0.5"])
    assert "but smoke/0001 on 2 of 10 tasks scored, too few" in capsys.readouterr().out


def test_nothing_is_best_while_nothing_is_measured(tmp_path, capsys):
    out = shown(capsys, "table", make(tmp_path, 1), make(tmp_path, 2))
    assert "best" not in out and "smoke/0002 running" in out


def test_runs_of_equal_results_or_of_different_tasks_or_scoring_have_no_best(tmp_path):
    first, elsewhere = make(tmp_path, 1, 0, 0.5), make(tmp_path, 2, 0, 0.9)
    path = elsewhere.path / "eval" / "trained.json"
    path.write_text(path.read_text().replace('"task_seed": 10', '"task_seed": 20'))
    for other, why in (
        (elsewhere, "different tasks"),
        (make(tmp_path, 2, success=0.5), "equal success and reward"),
        (make(tmp_path, 2, 0, 0.9, success_reward=0.5), "differ in env.success_reward"),
    ):
        result = compared(first, other)
        assert (result.best, result.best_run) == (None, None)
        assert why in result.notes[0]


def test_runs_of_one_setting_and_different_code_are_named(tmp_path):
    first, second = make(tmp_path, 1, 0, 0.5), make(tmp_path, 1, 1, 0.9)
    for folder, digest in ((first, "1"), (second, "2")):
        folder.update(callables={"mine:score": digest * 64})
    notes = compared(first, second).notes
    assert len(notes) == 1 and "callables.mine:score was 111111111111, is 2222" in notes[0]
    assert notes[0].startswith("smoke/0002 has the settings of smoke/0001 but other code")


def test_a_run_is_taken_once_whatever_it_is_called(tmp_path):
    made = make(tmp_path, success=0.5)
    found = find_runs([str(made.path), str(made.path.parent / "latest")])
    assert [run.id for run in found.runs] == ["smoke/0001"]


def test_an_evaluation_without_training_is_compared_too(tmp_path):
    made = run_samples.create(tmp_path)
    run_samples.evaluate(made, "scripted", 0.4, step=None)
    made.finish("finished")
    assert compared(made).settings[0].figures["success"].mean == 0.4


# --- sweeps ------------------------------------------------------------------------------------


def test_the_runs_of_a_sweep_are_found_by_its_stamp(tmp_path):
    sweep = tmp_path / "sweeps" / STAMP
    sweep.mkdir(parents=True)
    for seed, stamp in enumerate((STAMP, "another", STAMP, None)):
        make(tmp_path, seed=seed, sweep=stamp)
    jobs = [
        {"index": 0, "run": "smoke/0001"},
        {"index": 1, "run": None, "overrides": ["seed=x"], "status": "failed", "cause": "no"},
    ]
    (sweep / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    found = find_runs([str(sweep)])
    assert [run.id for run in found.runs] == ["smoke/0001", "smoke/0003"]
    assert found.lost_jobs == ["job 1 (seed=x): failed, no"]
    assert found.title == f"Sweep {STAMP}"


def test_of_many_jobs_without_a_run_some_are_listed(tmp_path):
    sweep = tmp_path / "sweeps" / STAMP
    sweep.mkdir(parents=True)
    jobs = [{"index": number, "status": "failed", "run": None} for number in range(100_000)]
    (sweep / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    *listed, last = find_runs([str(sweep)]).lost_jobs
    assert len(listed) == 100
    assert last.startswith("99,900 more jobs without a run")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["nowhere"], "no folder .*nowhere"),
        (["smoke"], "not a run folder.*try .*smoke/latest"),
        (["sweeps/empty"], "empty has no runs.*name run folders"),
        (["smoke/0001", "sweeps/empty"], "is a sweep; name it alone"),
    ],
)
def test_what_is_no_run_and_no_sweep_is_rejected(tmp_path, names, expected):
    make(tmp_path)
    (tmp_path / "sweeps" / "empty").mkdir(parents=True)
    with pytest.raises(RunFolderError, match=expected):
        find_runs([str(tmp_path / name) for name in names])


# --- forms -------------------------------------------------------------------------------------


def test_each_form_has_the_best_first(tmp_path, capsys):
    two = make(tmp_path, 1e-5, 0, 0.2), make(tmp_path, 1e-4, 0, 0.9)
    lines = shown(capsys, "table", *two).splitlines()
    assert lines[1].startswith("*smoke/0002") and lines[2].startswith("smoke/0001")
    assert "best: smoke/0002, of optimizer.lr=0.0001: success 90%" in "\n".join(lines)
    values = json.loads(shown(capsys, "json", *two))
    assert (values["best"], values["keys"]) == ("smoke/0002", ["trainer.optimizer.lr"])
    best = values["settings"][0]
    assert best["values"] == {"trainer.optimizer.lr": 1e-4}
    assert best["figures"]["success"]["mean"] == 0.9
    assert best["runs"][0]["status"] == "finished"
    rows = list(csv.DictReader(io.StringIO(shown(capsys, "csv", *two))))
    assert [row["trainer.optimizer.lr"] for row in rows] == ["0.0001", "1e-05"]
    assert float(rows[0]["success low"]) < float(rows[0]["success"]) == 0.9
    lines = shown(capsys, "md", *two).splitlines()
    assert lines[0].startswith("|  | optimizer.lr | runs | seeds | success |")
    assert lines[2].startswith("| smoke/0002 | 0.0001 | 1 finished | 1 | 90% [")


def test_the_shell_is_offered_runs_and_sweeps(tmp_path, monkeypatch):
    make(tmp_path / "runs")
    (tmp_path / "runs" / "sweeps" / STAMP).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert complete_run("runs/smoke/0") == ["runs/smoke/0001"]
    assert complete_run("") == ["runs/smoke/0001", "runs/smoke/latest", f"runs/sweeps/{STAMP}"]
    assert complete_run(f"{tmp_path}/runs/smoke/l") == [f"{tmp_path}/runs/smoke/latest"]
    assert complete_subject("ru") == [*complete_run("ru"), "runs_dir="]
    assert "model=tiny" in complete_subject("model=t")


def test_one_run_is_the_best_of_itself(tmp_path, capsys):
    assert "best: smoke/0001: success 50% [" in shown(capsys, "table", make(tmp_path, success=0.5))
