"""The alarms about a training: each is raised by what it is about, and by nothing else."""

import pytest

from openenv_pipe.errors import TrainingError
from openenv_pipe.reports.alarms import AlarmWatch, check_mismatch, find_alarms

SOUND = {
    "stage": "grpo",
    "success/rate": 0.4,
    "reward/mean": 0.9,
    "reward/std": 0.5,
    "loss/total": 0.1,
    "sampling/entropy": 1.0,
    "loss/entropy": 1.0,
    "grad/norm": 1.0,
    "mismatch/mean": 0.001,
    "clip/share": 0.01,
    "episodes/count": 64,
    "episodes/failed": 0,
    "episodes/truncated": 2,
    "judge/failed": 0,
    "groups/trained": 6,
    "groups/skipped": 2,
    "replies/unusable": 0.1,
}


# The fall of the reward is within its noise, so that it raises no alarm of its own.
NO_SIGNAL = {"groups/trained": 0, "groups/skipped": 8, "reward/mean": 0.6}
MASTERED = 1.0


def steps(last: dict, num_steps: int = 20) -> list[dict]:
    """Sound steps, of which the last five have other values."""
    changed = range(num_steps - 5, num_steps)
    return [
        {**SOUND, "step": number, **(last if number in changed else {})}
        for number in range(num_steps)
    ]


def test_a_sound_run_has_no_alarm():
    assert find_alarms(steps({})) == []
    assert find_alarms([]) == []
    assert find_alarms([{"stage": "warm_start", "step": 1}]) == []


@pytest.mark.parametrize(
    ("last", "metric", "words"),
    [
        ({"sampling/entropy": 0.05}, "sampling/entropy", "collapsed from 1 to 0.05"),
        ({"groups/skipped": 18}, "groups/skipped", "75% of the last groups"),
        ({"mismatch/mean": 0.05}, "mismatch/mean", "from 0.001 to 0.05"),
        (
            {"groups/skipped": 18, "episodes/masked": 40},
            "episodes/masked",
            "cut off 62% of the last",
        ),
        ({"clip/share": 0.3}, "clip/share", "30% of the tokens"),
        ({"episodes/truncated": 32}, "episodes/truncated", "ended 50%"),
        ({"episodes/failed": 8}, "episodes/failed", "12% of the episodes failed"),
        ({"judge/failed": 64}, "judge/failed", "for 100% of the episodes"),
        ({"replies/unusable": 0.9}, "replies/unusable", "90% of the replies of the last steps"),
        ({"kl/start": 6.0}, "kl/start", "is 6 nats a token"),
        ({"grad/norm": None}, "grad/norm", "grad/norm of step 19 is not a finite number"),
        ({"grad/norm": 11.0}, "grad/norm", "has grown from 1 to 11"),
        (
            {"reward/mean": 0.1},
            "reward/mean",
            "from 0.9, its best mean over 5 steps, at step 4, to",
        ),
    ],
)
def test_what_goes_wrong_is_said_with_what_to_try(last, metric, words):
    (alarm,) = find_alarms(steps(last))
    assert alarm.metric == metric
    assert words in alarm.what
    assert alarm.advice


@pytest.mark.parametrize(
    ("by_clients", "advice"),
    [({}, "env.step_timeout_s"), ({"clients/lost": 3, "clients/late": 2}, "agent.group_timeout_s")],
)
def test_who_failed_decides_where_to_look(by_clients, advice):
    (alarm,) = find_alarms(steps({"episodes/failed": 8, **by_clients}))
    assert f"raise {advice}" in alarm.advice


def test_episodes_without_an_answer_in_time_are_named():
    (alarm,) = find_alarms(steps({"episodes/failed": 8, "episodes/timed_out": 1}))
    assert "because their environment gave no answer in time" in alarm.what
    (alarm,) = find_alarms(steps({"episodes/failed": 8}))
    assert "in time" not in alarm.what


@pytest.mark.parametrize(("num_asked", "first"), [(30, "max_tokens in"), (4, "env.max_reply")])
def test_a_limit_that_requests_set_themselves_is_named(num_asked, first):
    cut = {"episodes/truncated": 32, "episodes/cut_by_request": num_asked}
    (alarm,) = find_alarms(steps(cut))
    assert alarm.advice.startswith(f"raise {first}")
    assert f"which cut off {num_asked / 64:.0%} of the episodes" in alarm.advice
    assert ("env." in alarm.advice) == (num_asked == 4)


def cut_off(rewards: list[float], entropy: float) -> list[dict]:
    """Steps all of whose episodes are cut off."""
    changes = {"episodes/truncated": 64, "sampling/entropy": entropy, "loss/entropy": entropy}
    return [
        {**SOUND, **changes, "step": step, "reward/mean": reward, "reward/std": 0.03}
        for step, reward in enumerate(rewards)
    ]


def test_a_limit_is_no_matter_while_the_reward_rises_and_is_one_from_then_on():
    rising = [0.02 * step for step in range(12)]
    for num_steps in range(5, 12):
        assert find_alarms(cut_off(rising[:num_steps], 1.0)) == []
    (alarm,) = find_alarms(cut_off(rising + 9 * [rising[-1]], 1.0))
    assert alarm.metric == "episodes/truncated"


def test_a_limit_is_no_matter_to_random_tokens_and_is_one_to_a_model_that_can_write():
    """The first rewards of random weights are as those of `env new`: they hardly rise yet."""
    first = [0.009, 0.012, 0.011, 0.012, 0.012]
    assert find_alarms(cut_off(first, 5.5)) == []
    watch = AlarmWatch([], 0.02)
    (told,) = [text for step in cut_off(first, 1.0) for text in watch.new_alarms(step)]
    assert "A limit of tokens or turns ended 100%" in told


@pytest.mark.parametrize(
    ("memory", "is_told"),
    [
        (lambda step: 4 + 0.05 * step, True),
        (lambda step: 4.0, False),
        (lambda step: 4 + min(step, 30) * 0.1, False),  # it has reached its level
        (lambda step: 4 + (step % 7) * 0.1, False),
    ],
)
def test_memory_that_rises_steadily_is_told(memory, is_told):
    records = [{**SOUND, "step": step, "time/memory_gib": memory(step)} for step in range(100)]
    for record in records[1::3]:
        del record["time/memory_gib"]  # short steps are not all measured
    found = [alarm for alarm in find_alarms(records) if alarm.metric == "time/memory_gib"]
    assert len(found) == is_told
    if is_told:
        assert "rises steadily: from 5.2" in found[0].what


def test_certainty_after_success_is_no_collapse():
    assert find_alarms(steps({"sampling/entropy": 0.01, "success/rate": 0.99})) == []


def test_equal_replies_to_solved_tasks_are_no_lack_of_exploration():
    same = {"groups/trained": 0, "groups/skipped": 8, "skipped/identical": 8, "skipped/solved": 8}
    (alarm,) = find_alarms(steps(same | {"sampling/entropy": 0.01, "success/rate": 0.98}))
    assert alarm.metric == "groups/skipped" and "too easy for the model" in alarm.advice


def test_short_replies_that_are_alike_are_no_lack_of_exploration():
    """Late in a game, a single move is left: the members of a group write the same."""
    alike = {"groups/trained": 6, "groups/skipped": 8, "skipped/identical": 6, "skipped/solved": 5}
    records = steps(alike | {"sampling/entropy": 0.6, "success/rate": 0.6})
    (alarm,) = find_alarms(records)
    assert alarm.metric == "groups/skipped" and "explores" not in alarm.what


def test_a_complete_collapse_is_named_although_nothing_is_trained_any_more():
    """loss/entropy is of trained tokens, and there are none once all members write the same."""
    gone = {"sampling/entropy": 0.0, "groups/trained": 0, "groups/skipped": 8}
    gone |= {"skipped/identical": 8, "skipped/solved": 3, "skipped/unsolved": 5}
    records = steps(gone)
    for record in records[-5:]:
        del record["loss/entropy"]
    identical, collapse = find_alarms(records)
    assert collapse.metric == "sampling/entropy" and "collapsed from 1 to 0" in collapse.what
    assert identical.metric == "skipped/identical"
    assert "In 100% of these, all members wrote the same" in identical.what
    assert "too hard" not in identical.advice and "too easy" not in identical.advice


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ({"skipped/solved": 16, "skipped/unsolved": 2}, "too easy"),
        ({"skipped/solved": 1, "skipped/unsolved": 17}, "too hard"),
        ({"skipped/solved": 9, "skipped/unsolved": 9}, "depends on the task"),
        ({"skipped/solved": 0, "skipped/unsolved": 0, "success/rate": 0.5}, "depends on the task"),
        ({"skipped/solved": 6, "skipped/unsolved": 12}, "depends on the task"),
    ],
)
def test_the_advice_depends_on_why_groups_have_no_signal(why, words):
    (alarm,) = find_alarms(steps({"groups/skipped": 18, **why}))
    others = {"too easy", "too hard", "depends on the task"} - {words}
    assert words in alarm.advice.split(".")[0]
    assert words == "depends on the task" or not any(each in alarm.advice for each in others)


@pytest.mark.parametrize(
    ("before", "last", "is_collapse"),
    [
        ({}, NO_SIGNAL, True),
        ({}, NO_SIGNAL | {"groups/trained": 1, "groups/skipped": 7}, False),
        ({}, NO_SIGNAL | {"reward/mean": MASTERED}, False),  # whatever success is
        ({"groups/trained": 1, "groups/skipped": 7}, NO_SIGNAL, False),  # it was always rare
        ({}, NO_SIGNAL | {"groups/skipped": 32}, True),  # with sampling in rounds
        ({}, NO_SIGNAL | {"episodes/masked": 64, "episodes/count": 64}, True),
        ({}, {"replies/unusable": 0.7}, True),
        ({"replies/unusable": 0.4}, {"replies/unusable": 0.7}, False),
        ({"replies/unusable": 0.8}, {"replies/unusable": 0.9}, False),  # it never could
    ],
)
def test_what_was_there_and_is_lost_is_a_collapse(before, last, is_collapse):
    records = steps(last)
    alarms = find_alarms([*({**each, **before} for each in records[:-5]), *records[-5:]])
    (alarm,) = (each for each in alarms if each.metric != "reward/mean")
    assert alarm.is_collapse == is_collapse


def test_a_collapse_is_raised_after_an_alarm_on_the_same_metric():
    """A model that could not act has learned to, and then loses it."""
    shares = [0.8] * 6 + [0.1] * 6 + [0.9] * 6
    watch, raised = AlarmWatch([], 0.1), []
    for step, share in enumerate(shares, 1):
        new = watch.new_alarms({**SOUND, "step": step, "replies/unusable": share})
        raised += [(step, watch.collapse is not None)] * len(new)
    assert raised == [(5, False), (16, True)]


STEP = {**SOUND, "step": 3, "mismatch/max": 0.01}


@pytest.mark.parametrize(
    ("measured", "is_alarm", "ends"),
    [
        ({}, False, False),
        ({"mismatch/mean": 0.024}, False, False),
        ({"mismatch/mean": 0.026}, True, False),
        ({"mismatch/mean": 0.11, "mismatch/kl": -0.1}, True, True),
        ({"mismatch/max": 0.9}, False, False),
        ({"mismatch/max": 1.1}, True, False),
        ({"mismatch/max": 5.2}, True, True),
        ({"mismatch/max": None}, False, False),
        # Learning itself moves tokens of older weights: it is said, and ends nothing.
        ({"mismatch/mean": 0.2, "mismatch/max": 6.0, "staleness/max": 1}, False, False),
        ({"mismatch/mean": 0.24, "mismatch/max": 6.0, "staleness/max": 1}, True, False),
        ({"mismatch/mean": 0.77, "mismatch/max": 6.0, "staleness/max": 1}, True, False),
        ({"mismatch/mean": 0.31, "mismatch/max": 6.0, "staleness/max": 2}, False, False),
    ],
)
def test_a_large_mismatch_is_said_and_a_larger_one_ends_the_run(measured, is_alarm, ends):
    step = {**STEP, **measured}
    found = [alarm for alarm in find_alarms([step], 0.1) if alarm.metric == "mismatch/max"]
    assert len(found) == is_alarm
    later = [step, *({**STEP, "step": number} for number in range(4, 30))]
    assert len([each for each in find_alarms(later, 0.1) if each in found]) == is_alarm
    if not ends:
        check_mismatch(step, 0.1)
        return
    with pytest.raises(TrainingError, match=r"step 3: .* nats in the mean .*max_mismatch=0\.1"):
        check_mismatch(step, 0.1)


def test_a_step_that_trains_nothing_has_no_mismatch():
    step = {"stage": "grpo", "step": 1}
    check_mismatch(step, 0.02)
    assert find_alarms([step], 0.02) == []


def test_groups_of_different_tasks_are_said_from_the_first_on():
    records = steps({})
    assert find_alarms([{**each, "groups/unlike": 0} for each in records]) == []
    (alarm,) = find_alarms([{**records[0], "groups/unlike": 3}, *records[1:]])
    assert "The members of 3 of 8 groups in step 0 were" in alarm.what
    assert "(in 1 of 20 steps so far)" in alarm.what
    assert alarm.at_once and "env check" in alarm.advice


def test_a_run_says_each_alarm_once_and_most_of_them_after_five_steps():
    bad = {**SOUND, "groups/skipped": 18, "groups/unlike": 1}
    watch = AlarmWatch([], 0.1)
    said = [watch.new_alarms({**bad, "step": number}) for number in range(1, 9)]
    assert [len(each) for each in said] == [1, 0, 0, 0, 1, 0, 0, 0]
    assert "ignores its seed" in said[0][0] and "had no signal" in said[4][0]
    resumed = AlarmWatch([{**bad, "step": number} for number in range(1, 6)], 0.1)
    assert resumed.new_alarms({**bad, "step": 6}) == []
    (mismatch,) = resumed.new_alarms({**bad, "step": 7, "mismatch/mean": 0.09, "mismatch/max": 0.2})
    assert mismatch.startswith("alarm: In step 7, the logprobs of sampler and trainer differ")


def test_the_keys_that_advice_names_exist():
    """An advice that names a key of the configuration must name a real one."""
    import re

    from openenv_pipe.config.schema_keys import locate

    names = {
        name
        for changes in (
            {"sampling/entropy": 0.05},
            {"groups/skipped": 18},
            {"groups/skipped": 18, "skipped/identical": 18, "sampling/entropy": 0.05},
            {"groups/unlike": 1},
            {"clip/share": 0.3},
            {"kl/start": 9.0},
            {"groups/skipped": 18, "episodes/masked": 40},
        )
        for alarm in find_alarms(steps(changes))
        for name in re.findall(r"\b(?:trainer|env)\.[a-z_.]+[a-z_]", alarm.advice)
    }
    assert len(names) >= 5
    for name in names:
        locate(name.split("."))


@pytest.mark.parametrize(
    ("rewards", "falls"),
    [
        ([0.2] * 5 + [0.8] * 5 + [0.4] * 5, True),  # more than half of what was gained
        ([0.2] * 5 + [0.8] * 5 + [0.6] * 5, False),
        ([0.8] * 10 + [0.2] * 5, True),  # nothing was gained, and much is lost
        ([-0.1] * 5 + [-0.05] * 5 + [-0.9] * 5, True),
        ([0.16] * 5 + [0.39] * 5 + [0.15] * 5, False),  # within what chance explains
        ([0.2] * 9, False),
    ],
)
def test_a_reward_falls_if_more_is_lost_than_chance_explains(rewards, falls):
    records = [
        {**SOUND, "step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)
    ]
    assert [alarm.metric for alarm in find_alarms(records)] == ["reward/mean"] * falls


def test_the_only_reward_of_a_run_is_no_fall():
    """One of 64 episodes earns 0.17 once, in step 12 of 30."""
    means = {"reward/mean": 0.0026, "reward/std": 0.021}
    records = [
        SOUND | {"step": step} | (means if step == 12 else dict.fromkeys(means, 0.0))
        for step in range(1, 31)
    ]
    assert "reward/mean" not in [alarm.metric for alarm in find_alarms(records)]


def test_after_a_collapse_a_run_that_goes_back_begins_anew():
    """A resumed run, which has only the records, is at the same point."""
    rewards = [0.8] * 10 + [0.2] * 5 + [0.8] * 10 + [0.2] * 5
    records = [
        {**SOUND, "step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)
    ]
    collapses = []
    for forgets in (True, False):
        watch, seen = AlarmWatch([], 0.1, forgets=forgets), []
        for record in records:
            watch.new_alarms(record)
            resumed = AlarmWatch(records[: record["step"]], 0.1, forgets=forgets)
            assert resumed.collapse == watch.collapse
            assert resumed.num_collapses == watch.num_collapses
            seen += [record["step"]] if watch.collapse else []
        collapses.append(seen)
    assert collapses == [[13, 28], [13]]
