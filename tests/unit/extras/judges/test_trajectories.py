"""What a judge is shown of an episode, and what is kept from it."""

from openenv_pipe.extras.judges.trajectories import conversation_of
from openenv_pipe.types import Status, Step
from tests.judged_groups import episode

REPORT = Step(action={}, observation={"reported": {"reward": 0.25, "metrics": {"right": 0.0}}})
ANSWER = Step(action={"say": "b"}, observation={"letter": "b"})


def test_a_judge_does_not_see_the_reward_that_a_program_reports():
    made = episode(0, "b")
    made.status, made.turns[0].steps = Status.DONE, [ANSWER, REPORT]
    shown = conversation_of(made)
    assert "reported" not in str(shown)
    assert shown[-1] == {"role": "environment", "content": {"letter": "b"}}


def test_an_episode_without_turns_shows_its_first_observation():
    made = episode(0, "")
    made.turns, made.first_observation = [], {"letter": "b"}
    assert conversation_of(made) == [{"role": "environment", "content": {"letter": "b"}}]


def test_all_observations_after_the_last_reply_are_shown_whatever_ended_the_episode():
    made = episode(0, "b")
    other = Step(action={"say": "c"}, observation={"letter": "c"})
    made.status, made.turns[0].steps = Status.TURN_LIMIT, [ANSWER, other]
    assert conversation_of(made)[-2:] == [
        {"role": "environment", "content": {"letter": "b"}},
        {"role": "environment", "content": {"letter": "c"}},
    ]


def test_the_end_is_shown_if_a_program_calls_the_model_once_more():
    made = episode(0, "b", "c")
    made.status = Status.DONE
    made.turns[0].steps, made.turns[1].steps = [ANSWER], [REPORT]
    assert conversation_of(made)[-1] == {"role": "environment", "content": {"letter": "b"}}
