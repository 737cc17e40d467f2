"""Comparing two run folders, and the tolerances for inexact runs."""

import json
from random import Random
from types import SimpleNamespace

import pytest
import run_samples
from fakes import made_up_group

from openenv_pipe.config.compose import amend
from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.reproduce import command
from openenv_pipe.extras.reproduce.bands import eval_bands, mismatch_band, step_bands
from openenv_pipe.extras.reproduce.comparing import RECORDED_DIGESTS, common_steps, first_mismatches
from openenv_pipe.pipeline.run import RunControl
from openenv_pipe.runs.differences import find_differences, find_other_facts
from openenv_pipe.runs.episodes import episodes_path, write_episodes
from openenv_pipe.runs.folder import RunFolder


class CheckedError(Exception):
    """Raised in place of a check of what a run needs."""


def reproduction_of(path, *, steps=None, is_replay):
    return command.reproduce(
        str(path),
        steps=steps,
        allow=(),
        is_replay=is_replay,
        runs_dir=None,
        command=[],
        control=RunControl(),
        trust=False,
    )


@pytest.mark.parametrize("is_replay", [True, False])
def test_a_replay_asks_for_no_secret_of_the_environment_that_it_never_starts(
    tmp_path, monkeypatch, is_replay
):
    variables = ["env.variables.GAME_TOKEN=abcdef-0123456789-abcdef"]
    folder = run_samples.create(tmp_path, amend(run_samples.config(tmp_path), variables))

    def check(config, *, plays):
        assert config.env.variables["GAME_TOKEN"] == "<hidden: GAME_TOKEN>"
        raise CheckedError

    monkeypatch.setattr(command, "check_requirements", check)
    expected = CheckedError if is_replay else RunFolderError
    with pytest.raises(expected):
        reproduction_of(folder.path, is_replay=is_replay)


@pytest.fixture
def two(tmp_path):
    """Two equal runs of two steps."""
    folders = []
    for name in ("one", "two"):
        folder = run_samples.create(tmp_path / name)
        run_samples.train(folder)
        folders.append(folder.path)
    return folders


def edit(path, **changes):
    """Rewrite the second line of metrics.jsonl with changed values."""
    lines = path.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **changes})
    path.write_text("\n".join(lines) + "\n")


def test_equal_runs_are_equal_whatever_time_they_took(two):
    edit(two[1] / "metrics.jsonl", **{"time/step_s": 77.0})
    assert first_mismatches(*two) == []
    assert common_steps(*two) == 2


def test_the_first_step_and_its_metrics_are_named(two):
    edit(two[1] / "metrics.jsonl", **{"reward/mean": 0.5, "loss/entropy": 0.5})
    write_episodes(episodes_path(two[1], 2), run_samples.groups(seed=9))
    found = first_mismatches(*two)
    assert [each.what for each in found[:2]] == ["loss/entropy", "reward/mean"]
    assert {each.where for each in found} == {"grpo step 2"}
    assert str(found[1]).endswith(", is 0.5")


def test_a_metric_that_is_new_is_a_difference_but_not_to_a_replay(two):
    edit(two[1] / "metrics.jsonl", **{"new/one": 1.0})
    assert str(first_mismatches(*two)[0]) == "grpo step 2: new/one was absent, is 1.0"
    assert first_mismatches(*two, only_learner=True) == []


def test_an_episode_that_differs_is_named(two):
    groups = run_samples.groups(seed=2)
    groups[0].episodes[1].reward += 1.0
    write_episodes(episodes_path(two[1], 2), groups)
    (found,) = first_mismatches(*two)
    assert found.what == "reward of episode 1/0, member 1"


def test_episodes_that_a_repetition_lacks_are_a_difference_but_not_to_a_replay(two):
    """Those of the run itself may have been deleted, and a replay plays none."""
    episodes_path(two[1], 2).unlink()
    (found,) = first_mismatches(*two)
    assert str(found) == "grpo step 2: the file of episodes was there, is absent"
    assert first_mismatches(*two, only_learner=True) == []
    assert first_mismatches(*reversed(two)) == []


def test_a_run_that_was_cut_short_is_compared_as_far_as_it_goes(two):
    path = two[1] / "metrics.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert first_mismatches(*two) == [] and common_steps(*two) == 1


def test_what_differs_beforehand_is_named(tmp_path):
    record = run_samples.create(tmp_path).record
    assert find_differences(record) == []
    other = record.model_copy(
        update={"code_digest": "0" * 64, "versions": {**record.versions, "torch": "1.0"}}
    )
    assert [(each.kind, each.name) for each in find_differences(other)] == [
        ("code", "openenv_pipe"),
        ("versions", "torch"),
    ]
    facts = {"tasks": {"train": {"num_tasks": 4, "digest": "a"}}, "num_parameters": 3}
    now = {"tasks": {"train": {"num_tasks": 5, "digest": "a"}}, "num_parameters": 4}
    (found,) = find_other_facts(facts, now)
    assert str(found) == "data: tasks.train.num_tasks was 4, is 5"


def test_changed_code_of_an_environment_is_named_by_its_files_where_they_are_known():
    old = {"env_code": "a"}
    before = {"env_code": "a", "env_files": {"models.py": "1" * 64, "server/app.py": "2" * 64}}
    now = {"env_code": "b", "env_files": {"models.py": "1" * 64, "client.py": "3" * 64}}
    assert [str(each) for each in find_other_facts(before, now)] == [
        "code: env_files.client.py was absent, is 333333333333",
        "code: env_files.server/app.py was 222222222222, is absent",
    ]
    assert [str(each) for each in find_other_facts(old, now)] == ["code: env_code was a, is b"]


def test_another_way_to_sample_or_train_is_named_but_not_another_measurement():
    left_out = {"fast": "it differs from the model's own by 0.0021"}
    before = {"sampler": "ragged", "learner": "packed", "left_out": left_out}
    measured = {**before, "left_out": {"fast": "it differs from the model's own by 0.0022"}}
    assert find_other_facts({"forward": before}, {"forward": measured}) == []
    now = {**before, "sampler": "whole rows", "learner": "padded"}
    assert [str(each) for each in find_other_facts({"forward": before}, {"forward": now})] == [
        "model: forward.sampler was ragged, is whole rows",
        "model: forward.learner was packed, is padded",
    ]
    assert find_other_facts({}, {"forward": now}) == []


def groups_of(*rewards):
    return [made_up_group(each, id=str(number)) for number, each in enumerate(rewards)]


OLD = groups_of([0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0])


def test_without_mismatch_there_is_no_band():
    reward, _ = step_bands(1, 0.0, OLD, OLD)
    assert reward.width == 0.0 and reward.holds


def test_bands_grow_with_mismatch_and_steps_up_to_independent_samples():
    def width(mismatch, step):
        return step_bands(step, mismatch, OLD, OLD)[0].width

    assert 0.0 < width(1e-5, 1) <= width(1e-3, 1) <= width(1e-3, 50)
    # the group means are 0.5, 0.75 and 0.25; this is the standard error of their mean
    errors = 0.25 / 3**0.5
    assert width(10.0, 50) == pytest.approx(min(4 * 2**0.5 * errors, 1.0 + 1e-9), rel=1e-6)


def test_a_reward_far_off_is_outside():
    worse = groups_of([0.0] * 4, [0.0] * 4, [0.0] * 4)
    reward, *_ = step_bands(1, 1e-5, OLD, worse)
    assert not reward.holds


def test_a_sampler_that_became_worse_is_outside():
    assert mismatch_band(1, 1e-4, 2.5e-4).holds
    assert not mismatch_band(1, 1e-4, 5e-4).holds


def compared(tmp_path, num_recorded, num_seen, *, end, device, cause=None):
    """Compare made-up runs of so many steps, of which the new one had to reach the step `end`."""
    old, new = (run_samples.create(tmp_path / name) for name in ("old", "new"))
    for folder, num_steps in ((old, num_recorded), (new, num_seen)):
        run_samples.train(folder, num_steps)
        folder.update(device=device)
    new.finish("finished", cause=cause)
    config, progress = run_samples.config(tmp_path), RunControl().progress
    return command._compare(old, new, config, progress, end, is_replay=False, is_whole=False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_repetition_that_ended_too_early_is_different_and_says_why(tmp_path, device):
    cause = "stopped by trainer.guard=stop after step 1: the reward collapsed"
    found = compared(tmp_path, 4, 1, end=4, device=device, cause=cause)
    assert not found.is_same and found.num_steps == 1
    assert found.first_difference == f"it ended after step 1 of 4: {cause}"
    said = (found.path / "reproduction.md").read_text()
    assert "different: it ended after step 1 of 4" in said


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_repetition_of_the_first_steps_need_not_have_the_others(tmp_path, device):
    assert compared(tmp_path, 4, 2, end=2, device=device).is_same


def test_without_bands_an_inexact_run_is_not_called_the_same(tmp_path):
    with pytest.raises(RunFolderError, match=r"cannot be compared .* it ran on cuda"):
        compared(tmp_path, 0, 0, end=0, device="cuda")


def test_a_run_without_a_step_of_grpo_is_rejected_before_it_is_repeated_inexactly(
    tmp_path, monkeypatch
):
    for name in ("check_requirements", "prepare"):
        monkeypatch.setattr(command, name, lambda *_, **__: None)
    config = amend(run_samples.config(tmp_path), ["trainer.steps=0"])
    folder = run_samples.create(tmp_path, config)
    folder.update(device="cuda")
    with pytest.raises(RunFolderError, match=r"cannot be compared .* has mismatch/mean"):
        reproduction_of(folder.path, is_replay=True)
    assert not (tmp_path / "smoke" / "0002").exists()


STOPPED_EARLY = "stopped early: after step 2 the evaluation's success was 1.000"


@pytest.mark.parametrize(
    ("cause", "steps", "is_replay", "stop_after"),
    [
        (STOPPED_EARLY, None, False, None),
        ("stopped by trainer.guard=stop after step 2: it collapsed", None, False, None),
        ("stopped by a callback after grpo step 2: enough", None, False, None),
        # A replay plays no evaluation that could stop it.
        (STOPPED_EARLY, None, True, 2),
        (STOPPED_EARLY, 1, False, 1),
        (STOPPED_EARLY, 2, False, 2),
    ],
)
def test_a_run_that_stopped_before_its_planned_end_stops_itself_again(
    tmp_path, monkeypatch, cause, steps, is_replay, stop_after
):
    config = amend(run_samples.config(tmp_path), ["trainer.steps=9"])
    folder = run_samples.create(tmp_path, config)
    run_samples.train(folder, 2)
    folder.finish("finished", cause=cause)
    attempt, control = executed(folder.path, monkeypatch, steps=steps, is_replay=is_replay)
    assert attempt.stop_after == stop_after
    stops = [
        step
        for step in range(1, 10)
        if any(each(None, {"stage": "grpo", "step": step}) for each in control.callbacks)
    ]
    last = [2] if "a callback" in cause else [3]
    assert stops == (last if stop_after is None else [])


def test_a_recording_of_the_first_steps_ends_with_them(tmp_path, monkeypatch):
    folder = run_samples.create(tmp_path, amend(run_samples.config(tmp_path), ["trainer.steps=9"]))
    run_samples.train(folder, 2)
    (folder.path / RECORDED_DIGESTS).write_text('{"step_000002": {}, "step_000003": {}}')
    folder.finish("finished", cause="stopped early: after step 3 the evaluation's success was 1.0")
    assert executed(folder.path, monkeypatch)[0].stop_after == 2


def executed(path, monkeypatch, *, steps=None, is_replay=False):
    """Reproduce a made-up run without playing; return the attempt and the control it got."""
    found = []

    async def prepare(*_):
        """Do nothing."""

    def execute(attempt, control, recorded=None):
        found.append((attempt, control))
        attempt.folder.update(device="cpu")

    for name, function in (("run", execute), ("replay", execute), ("prepare", prepare)):
        monkeypatch.setattr(command, name, function)
    monkeypatch.setattr(command, "check_requirements", lambda *_, **__: None)
    monkeypatch.setattr(command, "facts_before", lambda *_: {})
    reproduction_of(path, steps=steps, is_replay=is_replay)
    ((attempt, control),) = found
    return attempt, control


def evaluated(two, label, *successes, step=2):
    """Save an evaluation of each run with its success; None: that run has none."""
    for path, success in zip(two, successes, strict=True):
        if success is not None:
            run_samples.evaluate(RunFolder.open(path), label, success, step)


@pytest.mark.parametrize(
    "label", ["start", "trained_greedy", "trained.echo", "during_000001", "baseline_random"]
)
def test_every_evaluation_of_the_run_is_compared(two, label):
    evaluated(two, "start.echo", 0.5, 0.5)
    evaluated(two, label, 0.5, 0.4)
    assert {each.where for each in first_mismatches(*two)} == {f"evaluation {label}"}
    assert first_mismatches(*two, only_learner=True) == []


@pytest.mark.parametrize("successes", [(0.5, None), (None, 0.5)])
@pytest.mark.parametrize("label", ["trained", "during_000001", "trained.echo"])
def test_a_whole_run_has_the_same_evaluations(two, label, successes):
    evaluated(two, label, *successes)
    (found,) = first_mismatches(*two, is_whole=True)
    was, now = ("absent" if each is None else "there" for each in successes)
    assert str(found) == f"evaluation {label}: the report was {was}, is {now}"
    assert first_mismatches(*two) == []


def test_an_evaluation_that_is_not_of_the_run_or_of_an_earlier_end_may_be_lacking(two):
    evaluated(two, "trained", 0.3, None, step=1)
    evaluated(two, "trained", 0.5, 0.5)
    for label in ("step_000002", "untrained", "baseline_random"):
        evaluated(two, label, 0.5, None)
    assert first_mismatches(*two, is_whole=True) == []


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_run_without_evaluations_is_repeated_without(tmp_path, monkeypatch, evaluates):
    folder = run_samples.create(tmp_path)
    run_samples.train(folder)
    if evaluates:
        run_samples.evaluate(folder, "start", 0.5)
    assert executed(folder.path, monkeypatch)[1].evaluates == evaluates


def samples(num_successes):
    return [run_samples.episode(Random(0), i, 0, success=i < num_successes) for i in range(50)]


def report_of(folder, num_successes):
    made = run_samples.create(folder)
    return run_samples.evaluation(made, "trained", samples(num_successes), 2).report


@pytest.mark.parametrize(("num_seen", "holds"), [(40, True), (30, True), (50, True), (5, False)])
def test_an_evaluation_may_differ_as_two_samples_do(tmp_path, num_seen, holds):
    """40 of 50 has a standard error of 0.057; 4 sqrt(2) of these are 0.32."""
    old, new = (report_of(tmp_path / name, n) for name, n in (("a", 40), ("b", num_seen)))
    bands = {band.metric: band for band in eval_bands(old, new, 0.95)}
    success = bands["eval/trained/success"]
    assert success.step == 2 and success.holds is holds
    if num_seen == 40:
        assert success.width == pytest.approx(4 * 2**0.5 * (0.8 * 0.2 / 50) ** 0.5, rel=0.1)


def test_a_repetition_whose_evaluation_is_worse_is_not_within_the_bands(tmp_path):
    old, new = (run_samples.create(tmp_path / name) for name in ("old", "new"))
    for folder, num_successes in ((old, 40), (new, 5)):
        run_samples.train(folder, 2)
        folder.update(device="cuda")
        run_samples.save(folder, "trained", samples(num_successes), step=2)
        folder.finish("finished")
    found = command._compare(
        *(old, new, run_samples.config(tmp_path), RunControl().progress, 2),
        is_replay=False,
        is_whole=True,
    )
    assert not found.is_same
    assert found.first_difference.startswith("grpo step 2: eval/trained/success was 0.8, is 0.1")


def test_a_later_attempt_that_began_with_other_code_is_named(tmp_path):
    """All attempts are repeated with one state, so the repetition may differ from there on."""
    folder = run_samples.create(tmp_path)
    folder.begin_attempt(
        folder.written_config,
        command=["openenv-pipe"],
        checkpoint=None,
        changed={},
        differences=["code: openenv_pipe was 1234, is 5678"],
    )
    notes = []
    command._notify_of_changes(folder, SimpleNamespace(note=notes.append))
    (note,) = notes
    assert "attempt 2 of the recorded run" in note and "was 1234, is 5678" in note
