"""What a judge is shown of an episode, and what is kept from it."""

from pathlib import Path

import pytest

from openenv_pipe.commands.recorded_groups import reject_unread
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.judges.trajectories import conversation_of
from openenv_pipe.types import Episode, Status, Step
from tests.judged_groups import episode, group

REPORT = Step(action={}, observation={"reported": {"reward": 0.25, "metrics": {"right": 0.0}}})
ANSWER = Step(action={"say": "b"}, observation={"letter": "b"})


def played(*steps: Step, messages: bool) -> Episode:
    made = episode(0, "b")
    made.status, made.turns[0].steps = Status.DONE, list(steps)
    if not messages:
        made.turns[0].messages = []
    return made


@pytest.mark.parametrize("messages", [True, False])
def test_a_judge_does_not_see_the_reward_that_a_program_reports(messages):
    shown = conversation_of(played(ANSWER, REPORT, messages=messages))
    assert "reported" not in str(shown)
    assert shown[-1] == {"role": "environment", "content": {"letter": "b"}}


def test_episodes_of_a_program_without_messages_cannot_be_judged(tmp_path: Path):
    config = compose(["conf=client", f"runs_dir={tmp_path}"]).config
    groups = [group(played(REPORT, messages=False))]
    with pytest.raises(RunFolderError, match="agent=client were recorded without their messages"):
        reject_unread(config, groups)
    groups[0].episodes.append(played(REPORT, messages=True))
    reject_unread(config, groups)
    reject_unread(compose(["conf=echo"]).config, [group(played(ANSWER, messages=False))])
