"""Delivery to trackers: several at once, in threads, whatever a tool does."""

import json
import threading
from collections import UserList

import pytest
import run_samples

from openenv_pipe.config.schema import PythonTrackerConfig, RunConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.runs.eval_report import summarise
from openenv_pipe.runs.evals import DURING, Evaluation, save_evaluation
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.trackers import delivery
from openenv_pipe.trackers.base import Opened
from openenv_pipe.trackers.build import Trackers, build_tracker
from openenv_pipe.trackers.delivery import read_state
from tests.fakes import made_up_group

LIMIT_S = 60  # for what a thread does at once


class Calls(UserList):
    """A list that a configuration passes as it is: those that are plain data are copied."""


class Recorder:
    """A tracker that notes its calls in `calls` and keeps its run's id if `run_id` is set."""

    def __init__(self, folder, *, calls, run_id=None, fail=0, hold=None):
        self.calls, self.run_id, self.fail, self.hold = calls, run_id, fail, hold

    def open(self, run):
        self._called("open", run)
        return Opened(run_id=self.run_id)

    def log(self, step):
        self._called("log", step)

    def close(self, status, summary):
        self._called("close", (status, dict(summary)))

    def _called(self, name, value):
        if self.hold is not None:
            self.hold.wait(LIMIT_S)
        if self.fail:
            self.fail -= 1
            raise ConnectionError("\x1b[31mno answer")
        self.calls.append((name, value))


class EvaluationRecorder(Recorder):
    """A recorder that takes evaluations as well."""

    def log_evaluation(self, evaluation):
        self._called("evaluation", evaluation)


class HoldingRecorder(EvaluationRecorder):
    """A recorder that shows evaluations with the next step only."""

    def log_evaluation(self, evaluation):
        super().log_evaluation(evaluation)
        return True


class SpoilingRecorder(Recorder):
    """A tracker that changes what it gets, and then leaves the process."""

    def open(self, run):
        run.config.clear()
        return super().open(run)

    def log(self, step):
        step.record.clear()
        step.groups[0].episodes.clear()
        raise SystemExit(0)


@pytest.fixture(autouse=True)
def _no_delays(monkeypatch):
    monkeypatch.setattr(delivery, "FIRST_DELAY_S", 0.001)


def tracked(tmp_path, **options):
    """A configuration with a recorder for each name, and the folder of a run without trackers."""
    trackers = {
        name: PythonTrackerConfig(type="python", target=f"{__name__}:Recorder", options=each)
        for name, each in options.items()
    }
    plain = run_samples.config(tmp_path)
    folder = RunFolder.create(plain, overrides=[], command=[])
    return plain.model_copy(update={"tracker": trackers}), folder


def taking_evaluations(tmp_path, recorder="EvaluationRecorder", **options):
    """The same as `tracked`, with recorders that take evaluations."""
    config, folder = tracked(tmp_path, **options)
    target = f"{__name__}:{recorder}"
    trackers = {
        name: each.model_copy(update={"target": target}) for name, each in config.tracker.items()
    }
    return config.model_copy(update={"tracker": trackers}), folder


def evaluation(config, label, step, rewards=(0.0, 1.0)):
    group = made_up_group(rewards)
    for each in group.episodes:
        each.reward_terms = dict.fromkeys(config.reward.counted, each.reward)
    facts = {"reward": config.reward, "model": "tiny", "step": step, "temperature": 1.0}
    report = summarise(label, group.episodes, config.eval, config.seed, **facts)
    return Evaluation(report=report, groups=[group])


def labels_of(calls):
    """The steps and the labels of evaluations, in the order in which they came."""
    return [
        value.report.label if name == "evaluation" else value.record["step"]
        for name, value in calls
        if name in ("log", "evaluation")
    ]


def record(step, **values):
    return {"step": step, "stage": "grpo", **values}


def steps_of(calls):
    return [value.record["step"] for name, value in calls if name == "log"]


def deliver(config, folder, *steps, end="finished", notify=pytest.fail):
    """Give all trackers of a configuration these steps, and the end."""
    trackers = Trackers(config, folder, notify)
    for step in steps:
        trackers.log(record(step))
    trackers.close(end, {})


def test_all_trackers_get_all_steps_in_order_and_the_end(tmp_path):
    calls = {"one": Calls(), "two": Calls()}
    config, folder = tracked(tmp_path, one={"calls": calls["one"]}, two={"calls": calls["two"]})
    trackers = Trackers(config, folder, pytest.fail)
    groups = [made_up_group([0.0, 1.0])]
    trackers.log(record(1, loss=2.0), groups)
    trackers.log(record(2, loss=None))
    trackers.close("finished", {"eval/trained/success": 0.5})
    for each in calls.values():
        assert [name for name, _ in each] == ["open", "log", "log", "close"]
        assert steps_of(each) == [1, 2]
        assert each[1][1].groups == groups
        assert each[1][1].numbers == {"grpo/loss": 2.0}
        assert each[2][1].numbers == {}
        assert each[-1][1] == ("finished", {"eval/trained/success": 0.5})
    run = calls["one"][0][1]
    assert (run.id, run.parent, run.saved_id) == (folder.record.id, None, None)
    assert run.config == folder.written_config.model_dump(mode="json")


def test_the_configuration_has_marks_in_the_place_of_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("GAME_TOKEN", "a secret of the game")
    plain = run_samples.config(tmp_path).model_dump()
    plain["env"]["variables"] = {"GAME_TOKEN": "a secret of the game"}
    folder = RunFolder.create(RunConfig.model_validate(plain), overrides=[], command=[])
    calls = Calls()
    config, _ = tracked(tmp_path, one={"calls": calls})
    deliver(config, folder)
    assert "a secret of the game" not in json.dumps(calls[0][1].config)
    assert calls[0][1].config["env"]["variables"]["GAME_TOKEN"] == "<hidden: GAME_TOKEN>"


def test_a_failing_tracker_is_told_once_and_repeated_and_the_others_go_on(tmp_path):
    good, bad, told = Calls(), Calls(), Calls()
    config, folder = tracked(tmp_path, good={"calls": good}, bad={"calls": bad, "fail": 3})
    trackers = Trackers(config, folder, told.append)
    for step in (1, 2, 3):
        trackers.log(record(step))
    wait_for(lambda: steps_of(bad) == [1, 2, 3])
    trackers.close("finished", {})
    assert steps_of(good) == [1, 2, 3]
    assert [name for name, _ in bad] == ["open", "log", "log", "log", "close"]
    failure, recovery = told
    assert failure.startswith("tracker bad failed (ConnectionError: ")
    assert "\x1b" not in failure
    assert recovery == "tracker bad works again"


def wait_for(condition):
    for _ in range(LIMIT_S * 100):
        if condition():
            return
        threading.Event().wait(0.01)
    pytest.fail("it has not happened")


def test_a_tracker_that_always_fails_ends_with_the_run(tmp_path):
    calls, told = Calls(), Calls()
    config, folder = tracked(tmp_path, bad={"calls": calls, "fail": 10**9})
    deliver(config, folder, 1, end="failed", notify=told.append)
    assert calls == []
    assert [line.split(" (")[0] for line in told[:1]] == ["tracker bad failed"]
    assert told[-1].startswith("tracker bad has not received 1 steps and the end of the run")


def test_a_tracker_changes_nothing_and_cannot_end_its_thread_without_a_word(tmp_path):
    calls, told = Calls(), []
    config, folder = tracked(tmp_path, bad={"calls": calls})
    config.tracker["bad"].__dict__["target"] = f"{__name__}:SpoilingRecorder"
    groups, step = [made_up_group([1.0])], record(1)
    trackers = Trackers(config, folder, told.append)
    trackers.log(step, groups)
    trackers.close("finished", {})
    assert (groups, step) == ([made_up_group([1.0])], record(1))
    assert told[0].startswith("tracker bad failed (SystemExit: '0'); the run goes on")


def delivered(tmp_path, num_failures, num_steps):
    """Return the calls of a tool that fails so often after its start, and then gets a last step."""
    calls, told = Calls(), Calls()
    config, folder = tracked(tmp_path, bad={"calls": calls, "run_id": "it"})
    trackers = Trackers(config, folder, told.append)
    wait_for(lambda: calls)
    tracker = trackers._deliveries[0]._tracker
    tracker.fail = num_failures
    for step in range(1, num_steps):
        trackers.log(record(step))
    wait_for(lambda: tracker.fail == 0)
    trackers.log(record(num_steps))
    trackers.close("finished", {})
    return calls


def test_a_step_that_a_tool_never_takes_is_left_out(tmp_path):
    calls = delivered(tmp_path, delivery.MAX_ATTEMPTS, num_steps=2)
    assert steps_of(calls) == [2]
    assert [name for name, _ in calls] == ["open", "log", "close"]


def test_each_step_has_attempts_of_its_own(tmp_path):
    """An outage that ends after the first step is given up costs no other step."""
    calls = delivered(tmp_path, 2 * delivery.MAX_ATTEMPTS - 1, num_steps=4)
    assert steps_of(calls) == [2, 3, 4]


def test_steps_never_wait_for_a_tool_and_keep_few_episodes(tmp_path, monkeypatch):
    monkeypatch.setattr(delivery, "MAX_PENDING_EPISODES", 9)
    calls, hold = Calls(), threading.Event()
    config, folder = tracked(tmp_path, slow={"calls": calls, "hold": hold})
    trackers = Trackers(config, folder, pytest.fail)
    groups = [made_up_group([0.0, 1.0])]
    for step in range(1, 11):
        trackers.log(record(step), groups)  # returns although nothing can be delivered
    hold.set()
    trackers.close("finished", {})
    assert steps_of(calls) == [*range(1, 11)]
    kept = [value.record["step"] for name, value in calls if name == "log" and value.groups]
    assert kept == [7, 8, 9, 10]


def test_a_tool_that_never_answers_does_not_hold_up_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("openenv_pipe.trackers.build.END_LIMIT_S", 0.05)
    hold, told = threading.Event(), Calls()
    config, folder = tracked(tmp_path, dead={"calls": [], "hold": hold})
    deliver(config, folder, 1, notify=told.append)
    hold.set()
    assert told[0].startswith("tracker dead did not accept everything within")


def test_a_resumed_run_sends_nothing_twice_to_a_tool_that_keeps_it(tmp_path):
    first, second = Calls(), Calls()
    config, folder = tracked(tmp_path, kept={"calls": first, "run_id": "its id"})
    deliver(config, folder, 1, 2, 3, end="interrupted")
    assert read_state(folder.path, "kept").num_records == 3
    config.tracker["kept"].options["calls"] = second
    deliver(config, folder, 1, 2, 3, 4)  # the first two are of before its checkpoint
    assert second[0][1].saved_id == "its id"
    assert steps_of(second) == [4]


def test_a_tool_that_has_lost_the_run_gets_all_of_it_again(tmp_path):
    first, second = Calls(), Calls()
    config, folder = tracked(tmp_path, lost={"calls": first, "run_id": "one"})
    deliver(config, folder, 1, end="interrupted")
    config.tracker["lost"].options.update(calls=second, run_id="another")
    deliver(config, folder, 1, 2)
    assert steps_of(second) == [1, 2]


@pytest.mark.parametrize("content", ["{", "[]", '{"run_id": 3, "num_records": 0}', "null"])
def test_a_damaged_state_counts_as_none(tmp_path, content):
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "it.json").write_text(content)
    assert read_state(tmp_path, "it") is None


def test_evaluations_come_when_they_are_done(tmp_path):
    calls, others = Calls(), Calls()
    config, folder = taking_evaluations(tmp_path, one={"calls": calls}, two={"calls": others})
    config.tracker["two"] = PythonTrackerConfig(
        type="python", target=f"{__name__}:Recorder", options={"calls": others}
    )
    trackers = Trackers(config, folder, pytest.fail)
    trackers.log_evaluation(evaluation(config, "baseline_expert", None, rewards=(1.0, 1.0)))
    trackers.log_evaluation(evaluation(config, "start", 0))
    trackers.log(record(1))
    played = evaluation(config, f"{DURING}000001", 1)
    trackers.log_evaluation(played)
    wait_for(lambda: len(labels_of(calls)) == 4)  # the run goes on
    trackers.log(record(2))
    trackers.log_evaluation(evaluation(config, "trained", 2))
    trackers.close("finished", {})
    expected = ["baseline_expert", "start", 1, f"{DURING}000001", 2, "trained"]
    assert labels_of(calls) == expected
    assert [name for name, _ in others] == ["open", "log", "log", "close"]
    baseline, start, during, trained = [value for name, value in calls if name == "evaluation"]
    assert [each.index for each in (baseline, start, during, trained)] == [0, 0, 1, 2]
    assert [each.step for each in (baseline, start, during, trained)] == [0, 0, 1, 2]
    assert baseline.numbers["eval/baseline_expert/reward"] == 1.0
    assert during.numbers == {"eval/during/success": 0.0, "eval/during/reward": 0.5}
    assert during.groups == played.groups


def test_a_resumed_run_sends_the_evaluations_that_a_tool_lacks(tmp_path):
    keeps, loses = Calls(), Calls()
    options = {"keeps": {"calls": keeps, "run_id": "a"}, "loses": {"calls": loses}}
    config, folder = taking_evaluations(tmp_path, **options)
    done = [evaluation(config, "start", 0), evaluation(config, f"{DURING}000001", 1)]
    for attempt in (1, 2):
        for calls in (keeps, loses):
            calls.clear()
        trackers = Trackers(config, folder, pytest.fail)
        if attempt == 1:
            trackers.log_evaluation(done[0])
        trackers.log(record(1))
        if attempt == 1:
            trackers.log_evaluation(done[1])
            for each in done:
                save_evaluation(folder.path, each)
        else:
            trackers.log(record(2))
            trackers.log_evaluation(evaluation(config, "trained", 2))
        trackers.close("finished", {})
    assert labels_of(keeps) == [2, "trained"]
    assert labels_of(loses) == ["start", 1, f"{DURING}000001", 2, "trained"]
    start = next(value for name, value in loses if name == "evaluation")
    assert start.groups == ()
    assert start.report == done[0].report


def test_an_evaluation_that_a_tool_shows_with_the_next_step_is_sent_until_that_step(tmp_path):
    calls = Calls()
    options = {"it": {"calls": calls, "run_id": "a"}}
    config, folder = taking_evaluations(tmp_path, "HoldingRecorder", **options)
    done = [evaluation(config, f"{DURING}{step:06d}", step) for step in (1, 2)]
    seen = []
    for num_steps in (1, 2, 3):
        calls.clear()
        trackers = Trackers(config, folder, pytest.fail)
        for step in range(1, num_steps + 1):
            trackers.log(record(step))
            if step == num_steps and step <= len(done):
                trackers.log_evaluation(done[step - 1])
                save_evaluation(folder.path, done[step - 1])
        trackers.close("interrupted", {})
        seen.append(labels_of(calls))
    first, second = (each.report.label for each in done)
    assert seen == [[1, first], [first, 2, second], [second, 3]]
    sent = read_state(folder.path, "it").evaluations
    assert sent == [f"{first} of step 1", f"{second} of step 2"]


def test_an_evaluation_that_fails_is_sent_again(tmp_path):
    calls, told = Calls(), Calls()
    config, folder = taking_evaluations(tmp_path, one={"calls": calls, "fail": 2})
    trackers = Trackers(config, folder, told.append)
    trackers.log_evaluation(evaluation(config, "start", 0))
    wait_for(lambda: labels_of(calls) == ["start"])
    trackers.close("finished", {})
    assert labels_of(calls) == ["start"]
    assert [each.endswith("works again") for each in told] == [False, True]


def test_a_fork_knows_its_parent_in_the_same_tool(tmp_path):
    calls = Calls()
    config, parent = tracked(tmp_path, it={"calls": calls, "run_id": "of the parent"})
    deliver(config, parent)
    plain = run_samples.config(tmp_path)
    lineage = parent.lineage("fork", "step_000010")
    child = RunFolder.create(plain, overrides=[], command=[], lineage=lineage)
    deliver(config, child)
    run = calls[-2][1]
    assert (run.parent.kind, run.parent.id) == ("fork", parent.record.id)
    assert (run.parent.checkpoint, run.parent.tracker_run_id) == ("step_000010", "of the parent")
    assert run.saved_id is None


def test_a_tracker_without_the_interface_is_rejected(tmp_path):
    config, _ = tracked(tmp_path, it={})
    config.tracker["it"] = config.tracker["it"].model_copy(update={"target": "builtins:dict"})
    with pytest.raises(ConfigError, match=r"tracker\.it\.target='builtins:dict'"):
        build_tracker("it", config.tracker["it"], tmp_path)
