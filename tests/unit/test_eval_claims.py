"""What is claimed of evaluations: no more than the scored tasks and measured rewards allow."""

from dataclasses import replace
from random import Random

import pytest
import run_samples
from starlette.testclient import TestClient

from openenv_pipe.commands.findings import Result
from openenv_pipe.config.compose import amend, compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.lab.check.learning import learning_line
from openenv_pipe.extras.viewer.compare.grouping import compare_settings
from openenv_pipe.extras.viewer.compare.load import find_runs
from openenv_pipe.extras.viewer.compare.text import verdict
from openenv_pipe.extras.viewer.run_state import RunState
from openenv_pipe.extras.viewer.web import server
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.pipeline.evaluate import stop_reason
from openenv_pipe.reports.eval_table import Row, eval_tables, eval_warnings, scores_text
from openenv_pipe.reports.report import write_report
from openenv_pipe.reports.runs_table import list_runs
from openenv_pipe.runs.eval_difference import compare_reports
from openenv_pipe.runs.evals import read_stages, save_evaluation
from openenv_pipe.types import Status

RULER = ["reward=ruler", "judge=openai", "judge.model=m", "judge.base_url=http://127.0.0.1:1/v1"]
RULER.append("judge.api_key=null")


def survivors(folder, label, num_scored, success, step=0, num_tasks=10):
    """An evaluation of which only the first tasks were scored: the other episodes failed."""
    episodes = [run_samples.episode(Random(0), i, 0, success=success) for i in range(num_tasks)]
    for each in episodes[num_scored:]:
        each.status, each.error = Status.ERROR, "the server died"
    return run_samples.evaluation(folder, label, episodes, step)


@pytest.fixture
def folder(tmp_path):
    """A run whose evaluations have one scored task of ten, which succeeds after training."""
    made = run_samples.create(tmp_path)
    run_samples.train(made)
    save_evaluation(made.path, survivors(made, "start", 1, success=False))
    save_evaluation(made.path, survivors(made, "trained", 1, success=True, step=2))
    made.finish("finished")
    return made


def test_one_scored_task_of_ten_proves_nothing_in_the_report(folder):
    text = write_report(folder).read_text()
    assert "success rate 0% → 100%** (+100 points)" in text
    assert "on 1 of 10 tasks scored" in text and "no proof of a change" in text
    assert "provably changed" not in text and "[100%, 100%]" not in text
    assert "Warning:** after GRPO: only 1 of 10 tasks were scored" in text


def four_samples(tmp_path, num_hard):
    """A run with 10 tasks of 4 samples after training; the hard tasks fail once, and else lose."""
    made = run_samples.create(tmp_path)
    run_samples.train(made)
    episodes = run_samples.eval_episodes(10, 4)
    for each in episodes:
        each.success = each.task.index >= num_hard
        if each.member == 0 and not each.success:
            each.status, each.error = Status.ERROR, "the server died"
    _, report = run_samples.save(made, "trained", episodes, step=2)
    made.finish("finished")
    return made, report


def test_pass_at_k_says_on_how_many_tasks_it_is_if_others_have_fewer_samples(tmp_path):
    """Success and pass@2 are over 10 tasks, and pass@4 over the 8 that are easy."""
    folder, report = four_samples(tmp_path, num_hard=2)
    assert (report.num_scored_tasks, report.success.mean, report.pass_at[2].mean) == (10, 0.8, 0.8)
    assert report.pass_at[4].mean == 1.0
    (row,) = [r for r in write_report(folder).read_text().splitlines() if "eval/trained.md" in r]
    assert row.count("%] on 8 tasks |") == 1 and "| 10 of 10 |" in row
    page = (folder.path / "eval" / "trained.md").read_text()
    assert page.count("%] on 8 tasks |") == 1
    row = Row(name="after", report=report, folder=folder.path)
    (table,) = eval_tables([row], folder.written_config.eval, 0)
    assert [cell for cell in table.rows[0] if cell.endswith("on 8 tasks")] == [
        f"{report.pass_at[4]:.3f} on 8 tasks"
    ]
    notes = compare_settings(find_runs([folder.path])).notes
    assert [note for note in notes if "pass@" in note] == ["smoke/0001: pass@4 on 8 tasks of 10"]
    assert not any("pass@" in warning for warning in eval_warnings(report, folder.path))


def test_pass_at_k_of_few_tasks_is_left_out_with_a_warning(tmp_path):
    folder, report = four_samples(tmp_path, num_hard=3)
    assert {*report.pass_at} == {2}
    (warning,) = [each for each in eval_warnings(report, folder.path) if "pass@" in each]
    assert warning.startswith("no pass@4: only 7 of 10 tasks have 4 scored samples")


def test_every_line_about_an_evaluation_says_how_many_tasks_were_scored(folder):
    trained = read_stages(folder.path)["trained"]
    assert scores_text(trained).startswith("success 100.0%, reward 1.")
    assert scores_text(trained).endswith("on 1 of 10 tasks scored")
    (warning,) = eval_warnings(trained, folder.path)
    assert f"episodes {folder.path} --eval trained --status error`" in warning
    state = "\n".join(RunState(folder.path).image())
    assert "eval trained: success 100.0%" in state and "! eval trained: only 1 of 10" in state
    (row,) = list_runs([folder.path.parent.parent])
    assert row.success.endswith("→ 100% on 1/10 tasks")
    page = (folder.path / "eval" / "trained.md").read_text()
    assert "1 of 10 tasks scored" in page and "[" not in page.split("success |")[1].split("\n")[0]


@pytest.mark.parametrize(("num_distinct", "is_said"), [(1, True), (2, False), (20, False)])
def test_equal_episodes_are_no_evidence_of_many_tasks(tmp_path, num_distinct, is_said):
    folder = run_samples.create(tmp_path)
    episodes = [run_samples.episode(Random(0), i, 0, success=True) for i in range(20)]
    for number, each in enumerate(episodes):
        each.turns[-1].reply = f"reply {number % num_distinct}"
    report = run_samples.evaluation(folder, "start", episodes).report
    assert report.num_distinct == num_distinct
    warnings = [each for each in eval_warnings(report, folder.path) if "distinct" in each]
    assert [each[:24] for each in warnings] == ["only 1 of 20 scored epis"] * is_said


def test_episodes_without_an_answer_in_time_are_named(tmp_path):
    folder = run_samples.create(tmp_path)
    episodes = [run_samples.episode(Random(0), i, 0, success=True) for i in range(20)]
    episodes[3].status = Status.ERROR
    episodes[3].error = "SessionTimeoutError: no answer to step within 5 s"
    report = run_samples.evaluation(folder, "start", episodes).report
    assert report.num_timed_out == 1
    (warning,) = [
        each for each in eval_warnings(report, folder.path) if "env.step_timeout_s" in each
    ]
    assert warning.startswith("1 of 1 failed episodes had no answer of their environment within")
    assert "--eval start --status error` names the tasks" in warning


@pytest.mark.parametrize(
    ("num_alike", "successes", "is_said"), [(18, 8, True), (16, 8, False), (20, 20, False)]
)
def test_one_reply_to_most_tasks_is_a_warning_unless_it_is_always_right(
    tmp_path, num_alike, successes, is_said
):
    folder = run_samples.create(tmp_path)
    episodes = [run_samples.episode(Random(0), i, 0, success=i < successes) for i in range(20)]
    for number, each in enumerate(episodes):
        each.first_observation = {"question": f"message {number}"}
        each.turns = each.turns[:1]
        each.turns[0].reply = " account\n" if number < num_alike else "billing"
    evaluation = run_samples.evaluation(folder, "start", episodes)
    save_evaluation(folder.path, evaluation)
    report = evaluation.report
    assert report.common_reply.text == "account"
    told = f"{num_alike} of 20 replies are `account`, successful in {successes}"
    assert any(told in each for each in eval_warnings(report, folder.path)) is is_said
    assert (report.collapse == told) is is_said
    assert (told in (folder.path / "eval" / "start.md").read_text()) is is_said
    assert (told in write_report(folder).read_text()) is is_said


def test_single_replies_are_compared_only_if_all_are_short_and_tasks_differ(tmp_path):
    folder = run_samples.create(tmp_path)
    episodes = [run_samples.episode(Random(0), i, 0, success=False) for i in range(4)]
    for each in episodes:
        each.first_observation, each.turns = {"question": "the only one"}, each.turns[:1]
        each.turns[0].reply = "account"
    assert run_samples.evaluation(folder, "start", episodes).report.collapse is None
    for number, each in enumerate(episodes):
        each.first_observation = {"question": number}
    assert run_samples.evaluation(folder, "during_000001", episodes).report.collapse
    episodes[0].turns[0].reply = "a long thought " * 10
    assert run_samples.evaluation(folder, "during_000002", episodes).report.collapse is None


def test_the_viewer_shows_no_interval_of_one_task(folder):
    app = server.build_app(RunStore(folder.path.parent.parent))
    client = TestClient(app, base_url="http://127.0.0.1")
    found = client.get("/api/evaluations", params={"runs": "smoke/0001"}).json()
    assert [each["num_scored_tasks"] for each in found["reports"]] == [1, 1]
    assert found["reports"][1]["success"] == {"mean": 1.0, "low": None, "high": None}
    assert found["difference"]["success"] == {"mean": 1.0, "low": None, "high": None}
    assert found["difference"]["on"] == "1 of 10 tasks scored"
    (run,) = client.get("/api/runs").json()["runs"]
    assert run["success_trained"] == {
        "mean": 1.0,
        "low": None,
        "high": None,
        "on": "1 of 10 tasks scored",
    }


@pytest.mark.parametrize(("num_scored", "stops"), [(1, False), (7, False), (8, True), (10, True)])
@pytest.mark.parametrize("measure", ["success", "reward"])
@pytest.mark.parametrize("bound", ["low", "mean"])
def test_training_stops_only_by_enough_scored_tasks(tmp_path, num_scored, stops, measure, bound):
    folder = run_samples.create(tmp_path)
    report = survivors(folder, "during_000005", num_scored, success=True, step=5).report
    words = [f"eval.during.stop.measure={measure}", f"eval.during.stop.bound={bound}"]
    words += ["eval.during.every=5", "eval.during.stop.at=0.6"]
    reason = stop_reason(amend(folder.written_config, words), report)
    assert (reason is not None) == stops
    assert reason is None or f"on {report.on_tasks}" in reason


def test_equal_rewards_have_no_lower_end_and_their_mean_decides(tmp_path):
    folder = run_samples.create(tmp_path)
    episodes = [run_samples.episode(Random(0), i, 0, success=True) for i in range(10)]
    for each in episodes:
        each.reward = 1.0
    report = run_samples.evaluation(folder, "during_000005", episodes, 5).report
    assert (report.reward.low, report.reward.high) == (None, None)
    words = ["eval.during.every=5", "eval.during.stop.at=0.9", "eval.during.stop.measure=reward"]
    assert "reward was 1.000 on 10 tasks" in stop_reason(
        amend(folder.written_config, words), report
    )


def test_few_scored_tasks_are_never_the_best_of_a_comparison(tmp_path):
    runs = []
    for number, (num_scored, success) in enumerate([(1, True), (10, False)]):
        config = run_samples.config(tmp_path)
        trainer = config.trainer.model_copy(update={"tasks_per_step": 2 + number})
        folder = run_samples.create(tmp_path, config.model_copy(update={"trainer": trainer}))
        run_samples.train(folder)
        report = survivors(folder, "trained", num_scored, success=success, step=2)
        save_evaluation(folder.path, report)
        folder.finish("finished")
        runs.append(folder)
    found = compare_settings(find_runs([folder.path for folder in runs]))
    assert found.best_run.id == "smoke/0002"
    assert [setting.name for setting in found.not_told_apart] == ["trainer.tasks_per_step=2"]
    assert any("smoke/0001: on 1 of 10 tasks scored, too few" in line for line in verdict(found))


def test_the_probe_of_learning_proves_nothing_by_one_task(folder):
    line = learning_line(read_stages(folder.path), folder.written_config.eval, num_steps=2)
    assert line.result is Result.WARN
    assert "on 1 of 10 tasks scored" in line.text and "success_added_low" not in line.measured


def relative(tmp_path, words, num_samples=1):
    """The report of an expert that succeeds in half of the tasks, under a reward by comparison."""
    config = amend(run_samples.config(tmp_path), words)
    folder = run_samples.create(tmp_path, config)
    episodes = []
    for index in range(10):
        for member in range(num_samples):
            each = run_samples.episode(Random(0), index, member, success=index % 2 == 0)
            each.reward, each.reward_terms = 0.0, {"env": float(each.success)}
            for turn in each.turns:
                is_last = turn is each.turns[-1]
                turn.steps = [replace(turn.steps[0], reward=float(each.success and is_last))]
            episodes.append(each)
    return folder, run_samples.evaluation(folder, "baseline_expert", episodes)


def test_a_reward_that_compares_episodes_is_not_measured_by_single_ones(tmp_path):
    folder, evaluation = relative(tmp_path, RULER)
    report = evaluation.report
    assert report.reward is None and report.env_reward.mean == report.success.mean == 0.5
    assert "reward not measured (it compares the episodes of a group)" in scores_text(report)
    assert "the environment's own reward 0.500" in scores_text(report)
    save_evaluation(folder.path, evaluation)
    text = write_report(folder).read_text()
    assert "| environment's own reward |" in text and "(ruler), so single episodes" in text
    row = next(line for line in text.splitlines() if "baseline_expert" in line)
    assert "| – | 0.50 [" in row and "0.00 [" not in row
    change = compare_reports(report, report, folder.written_config.eval, 0)
    assert change.reward is None and change.env_reward.mean == 0.0


def test_a_verdict_on_several_samples_is_a_reward_and_a_standardised_one_never_is(tmp_path):
    _, evaluation = relative(tmp_path / "a", RULER, num_samples=2)
    judged = [each for group in evaluation.groups for each in group.episodes]
    for each in judged:
        each.reward, each.reward_terms["ruler"] = 0.7, 0.7
    folder = run_samples.create(tmp_path / "b", amend(run_samples.config(tmp_path / "b"), RULER))
    assert run_samples.evaluation(folder, "start", judged).report.reward.mean == pytest.approx(0.7)
    judged[0].reward_terms.pop("ruler")  # The other sample of its task failed.
    report = run_samples.evaluation(folder, "start", judged).report
    assert [len(task.rewards) for task in report.tasks][:2] == [1, 2]
    (warning,) = [each for each in eval_warnings(report, folder.path) if "reward" in each]
    assert warning.startswith("1 of 20 scored episodes have no reward")
    words = ["reward=env", "+reward.transforms.env=[{type: standardise}]"]
    words += ["reward.terms.env.per_turn=false"]
    _, evaluation = relative(tmp_path / "c", words, num_samples=2)
    assert evaluation.report.reward is None and evaluation.report.env_reward.mean == 0.5


@pytest.mark.parametrize("num_judged", [10, 4, 0])
def test_episodes_that_the_budget_of_the_judge_left_out_count_in_no_mean_reward(
    tmp_path, num_judged
):
    """Their reward is without the judge's term: here 0 in place of 0.8."""
    words = ["reward=judge", *RULER[1:], "judge.when_spent=continue"]
    folder = run_samples.create(tmp_path, amend(run_samples.config(tmp_path), words))
    episodes = []
    for index in range(10):
        each = run_samples.episode(Random(0), index, 0, success=True)
        each.reward, each.reward_terms = 0.0, {"env": 1.0}
        if index < num_judged:
            each.reward, each.reward_terms["judge"] = 0.8, 0.8
        episodes.append(each)
    report = run_samples.evaluation(folder, "trained", episodes).report
    warnings = [each for each in eval_warnings(report, folder.path) if "no reward" in each]
    if num_judged:
        assert report.reward.mean == pytest.approx(0.8)
    else:
        assert "reward not measured (a term has no value)" in scores_text(report)
    assert [each[:8] for each in warnings] == [f"{10 - num_judged} of 10 "[:8]] * (num_judged < 10)


@pytest.mark.parametrize(
    "words",
    [
        ["eval.during.every=2", "eval.during.stop.at=0.5", "eval.during.stop.measure=reward"],
        [
            "eval.during.every=2",
            "trainer.checkpoint.best={metric: eval/reward, direction: max}",
        ],
    ],
)
def test_a_reward_that_evaluations_do_not_measure_decides_nothing(words):
    with pytest.raises(ConfigError, match=r"ruler.* compare"):
        compose(["conf=smoke", *RULER, *words])
    assert compose(["conf=smoke", *RULER, *words, "eval.samples_per_task=2"])


def test_unusable_replies_of_an_evaluation_are_said_with_their_usual_cause(tmp_path):
    folder = run_samples.create(tmp_path)
    run_samples.train(folder)
    episodes = [run_samples.episode(Random(0), i, 0, success=False) for i in range(10)]
    for each in episodes:
        for turn in each.turns:
            turn.unusable = "it is no JSON"
    evaluation = run_samples.evaluation(folder, "start", episodes)
    (warning,) = eval_warnings(evaluation.report, folder.path)
    assert "100% of the replies could not be turned into an action" in warning
    assert f"`openenv-pipe episodes {folder.path} --eval start`" in warning
    save_evaluation(folder.path, evaluation)
    assert "Warning:** at the start: 100% of the replies" in write_report(folder).read_text()
    page = (folder.path / "eval" / "start.md").read_text()
    assert "100% of the replies could not be turned into an action" in page
