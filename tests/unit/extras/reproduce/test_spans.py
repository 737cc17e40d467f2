"""How many steps a run was planned to have, while it did each of them."""

from types import SimpleNamespace

import pytest

from openenv_pipe.extras.reproduce.spans import STEPS, planned_spans


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
