"""The alarms about a training: each is raised by what it is about, and by nothing else."""

import pytest

from openenv_pipe.reports.alarms import find_alarms

SOUND = {
    "stage": "grpo",
    "success/rate": 0.4,
    "loss/total": 0.1,
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
        ({"loss/entropy": 0.05}, "loss/entropy", "collapsed from 1 to 0.05"),
        ({"groups/skipped": 18}, "groups/skipped", "75% of the last groups"),
        ({"mismatch/mean": 0.05}, "mismatch/mean", "from 0.001 to 0.05"),
        ({"clip/share": 0.3}, "clip/share", "30% of the tokens"),
        ({"episodes/truncated": 32}, "episodes/truncated", "ended 50%"),
        ({"episodes/failed": 8}, "episodes/failed", "12% of the episodes failed"),
        ({"judge/failed": 64}, "judge/failed", "for 100% of the episodes"),
        ({"replies/unusable": 0.9}, "replies/unusable", "90% of the last replies"),
        ({"grad/norm": None}, "grad/norm", "grad/norm of step 19 is not a finite number"),
    ],
)
def test_what_goes_wrong_is_said_with_what_to_try(last, metric, words):
    (alarm,) = find_alarms(steps(last))
    assert alarm.metric == metric
    assert words in alarm.what
    assert alarm.advice


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
    assert find_alarms(steps({"loss/entropy": 0.01, "success/rate": 0.99})) == []


def test_the_advice_depends_on_why_groups_have_no_signal():
    (easy,) = find_alarms(steps({"groups/skipped": 18, "success/rate": 0.8}))
    (hard,) = find_alarms(steps({"groups/skipped": 18, "success/rate": 0.1}))
    assert "easier" in easy.advice and "too hard" in hard.advice


def test_the_keys_that_advice_names_exist():
    """An advice that names a key of the configuration must name a real one."""
    import re

    from openenv_pipe.config.schema_keys import locate

    names = {
        name
        for changes in ({"loss/entropy": 0.05}, {"groups/skipped": 18}, {"clip/share": 0.3})
        for alarm in find_alarms(steps(changes))
        for name in re.findall(r"\b(?:trainer|env)\.[a-z_.]+[a-z_]", alarm.advice)
    }
    assert len(names) >= 5
    for name in names:
        locate(name.split("."))
