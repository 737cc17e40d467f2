"""What a resume may change in a run, while the run did each of its steps."""

from types import SimpleNamespace

import pytest
import run_samples

from openenv_pipe.config.compose import amend
from openenv_pipe.config.diff import changed_keys
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.reproduce.spans import STEPS, Span, planned_spans


def spans_of(num_planned: int, *attempts: tuple[str | None, list[int] | None]) -> list[list[int]]:
    """Return [start, planned] of each span. attempts: the checkpoint, and the change if any."""
    folder = SimpleNamespace(
        written_config=SimpleNamespace(trainer=SimpleNamespace(steps=num_planned)),
        attempts=[
            SimpleNamespace(checkpoint=checkpoint, changed={STEPS: change} if change else {})
            for checkpoint, change in ((None, None), *attempts)
        ],
    )
    return [[span.start, span.num_planned] for span in planned_spans(folder)]


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([], [[0, 9]]),
        ([("step_000004", None)], [[0, 9]]),
        ([("step_000004", [4, 9])], [[0, 4], [4, 9]]),
        ([("warm_start_000004", [4, 9])], [[0, 9]]),
        ([(None, [4, 9])], [[0, 9]]),
        # The second attempt's steps are done again by the third.
        ([("step_000004", [4, 6]), ("step_000004", [6, 9])], [[0, 4], [4, 9]]),
        ([("step_000004", [4, 6]), ("step_000002", [6, 9])], [[0, 4], [2, 9]]),
        ([("step_000004", [4, 6]), ("step_000006", [6, 9])], [[0, 4], [4, 6], [6, 9]]),
        ([("step_000004", [4, 9]), ("step_000003", None)], [[0, 4], [3, 9]]),
    ],
)
def test_what_a_checkpoint_was_followed_by_counts(attempts, expected):
    assert spans_of(9, *attempts) == expected


BEST = "trainer.checkpoint.best={metric: eval/success, direction: max}"


@pytest.mark.parametrize(
    "words",
    [
        ["eval.during.every=1", "eval.during.stop={at: 0.5, bound: low, measure: reward}"],
        ["trainer.guard=stop", "trainer.checkpoint.every=3", "trainer.checkpoint.every_minutes=2"],
        ["trainer.checkpoint.best=null"],
        ["eval.during.every=1", BEST],
    ],
)
@pytest.mark.parametrize("is_back", [False, True])
def test_each_span_has_what_a_resume_changed(tmp_path, words, is_back):
    configs = [run_samples.config(tmp_path), amend(run_samples.config(tmp_path), words)]
    if is_back:
        configs.reverse()
    changed = changed_keys(*configs)
    # A repetition may run elsewhere than the resumed run did.
    changed |= {"trainer.devices": [1, 2], "tracker.type": ["none", "wandb"]}
    attempts = [(None, {}), ("step_000001", changed)]
    folder = SimpleNamespace(
        written_config=configs[1],
        attempts=[SimpleNamespace(checkpoint=at, changed=each) for at, each in attempts],
    )
    spans = planned_spans(folder)
    assert [span.start for span in spans] == [0, 1]
    assert [span.of(configs[1]) for span in spans] == configs


def test_a_changed_value_that_is_not_valid_is_rejected(tmp_path):
    span = Span(start=0, num_planned=2, others={"eval.during.every": "often"})
    with pytest.raises(ConfigError, match=r"during\.every"):
        span.of(run_samples.config(tmp_path))
