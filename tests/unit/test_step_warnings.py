"""Warnings of steps: replies become unusable, every action raises, or nothing has a reward."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import run_samples

from openenv_pipe.errors import FailureError
from openenv_pipe.pipeline.metrics_log import MetricsLog
from openenv_pipe.reports.alarm import WINDOW
from openenv_pipe.reports.unscored import METRIC, UnscoredWatch
from openenv_pipe.reports.unusable import UnusableWatch, unusable_warning
from openenv_pipe.types import Step


def _steps(*shares):
    return [
        {"stage": "grpo", "step": step, "replies/unusable": share}
        for step, share in enumerate(shares, start=1)
    ]


def test_a_model_that_learns_not_to_act_is_warned_of_once():
    text = unusable_warning(_steps(0.65, 0.7, 1.0, 1.0), limit=0.9)
    assert text.startswith("100% of the replies of step 3 are unusable, after 65% before")
    assert "reward=usable" in text
    assert unusable_warning(_steps(1.0, 1.0, 0.95), limit=0.9) is None, "it has never acted"
    assert unusable_warning(_steps(1.0, 0.2, 0.1), limit=0.9) is None, "it has learned to act"
    assert unusable_warning(_steps(1.0, 0.2, 0.95), limit=0.9) is not None, "it has unlearned it"
    assert unusable_warning([{"stage": "warm_start", "step": 1}], limit=0.9) is None
    watch = UnusableWatch(0.9)
    assert [watch.warning(each) is None for each in _steps(0.5, 1.0, 1.0)] == [True, False, True]


def test_a_server_on_which_every_action_raises_is_warned_of_once():
    """A model whose actions raise looks as bad as one that writes no action."""
    groups = run_samples.groups(num_groups=2)
    turns = [turn for group in groups for each in group.episodes for turn in each.turns]
    for turn in turns:
        turn.steps, turn.unusable = [], "the reply does not match"
    watch, record = UnusableWatch(0.9), {"stage": "grpo", "step": 4}
    assert watch.exceptions(record, groups) is None, "no action reached the server"
    for turn in turns[1:3]:
        turn.unusable = "EXECUTION_ERROR: no attribute"
    turns[0].steps = [Step(action={"text": "a"}, observation={})]
    assert watch.exceptions(record, groups) is None, "one was accepted"
    turns[0].steps = []
    warning = watch.exceptions(record, groups)
    assert warning.startswith("all 2 actions of step 4 that reached the environment raised there")
    assert "no attribute" in warning
    assert watch.exceptions(record, groups) is None


def test_a_step_whose_gradient_is_not_finite_is_warned_of_and_tracked_as_when_resumed(tmp_path):
    folder = run_samples.create(tmp_path)
    notes, tracked = [], []
    progress = SimpleNamespace(note=notes.append, advance=lambda record: None)
    trackers = SimpleNamespace(log=lambda record, groups: tracked.append(record))

    def opened():
        return MetricsLog(folder.written_config, folder, progress, trackers=trackers)

    log = opened()
    for step in range(1, WINDOW + 1):
        norm = float("nan") if step == WINDOW else 1.0
        log.write("grpo", step, {"loss/total": 0.5, "grad/norm": norm}, started=0.0)
    log.close()
    (alarm,) = notes
    assert alarm.startswith(f"alarm: grad/norm of step {WINDOW} is not a finite number")
    sent, tracked[:] = [*tracked], []
    opened().close()
    assert tracked == sent
    assert tracked[-1]["grad/norm"] is None


def _judged(*failed):
    return [
        {"stage": "grpo", "step": step, "episodes/count": 9, "episodes/failed": 1, METRIC: number}
        for step, number in enumerate(failed, start=1)
    ]


def test_a_step_without_any_reward_is_warned_of_once():
    group = run_samples.groups(num_groups=1)[0]
    group.episodes[1].unscored = "term 'ruler': the judge is\nsilent"
    watch = UnscoredWatch(9)
    warnings = [watch.warning(each, [group]) for each in _judged(0, 7, 8, 8)]
    assert warnings[:2] == [None, None] and warnings[3] is None
    assert warnings[2].startswith("no episode of step 3 has a reward, so nothing was learned")
    assert "the judge is" in warnings[2]
    assert "a verifier" in UnscoredWatch(9).warning(*_judged(8))
    assert UnscoredWatch(9).warning({**_judged(8)[0], "stage": "warm_start"}) is None
    none_played = {**_judged(0)[0], "episodes/failed": 9}
    assert UnscoredWatch(9).warning(none_played) is None


@pytest.mark.parametrize(
    ("failed", "num_steps", "ends"),
    [
        ((8, 8, 8), 100, True),
        ((8, 8, 7, 8, 8), 100, False),
        ((8, 8), 2, True),
        ((0, 0, 8), 3, False),
        ((), 0, False),
    ],
)
def test_steps_without_any_reward_end_the_run(failed, num_steps, ends):
    watch = UnscoredWatch(num_steps)
    for each in _judged(*failed):
        watch.warning(each)
    watch.warning({"stage": "warm_start", "step": 1})
    with pytest.raises(FailureError, match="no episode of the last") if ends else nullcontext():
        watch.check([])
