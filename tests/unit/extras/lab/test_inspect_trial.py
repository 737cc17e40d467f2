"""What `env inspect` makes of played episodes: templates, limits, penalties, and what it says."""

import pytest
from fakes import run_config

from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.config.schema import ServingConfig
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.environments.adapters.templates import compile_template, render_message
from openenv_pipe.environments.client.metadata import ServerMetadata
from openenv_pipe.environments.client.protocol import StepResult, error_of_frame
from openenv_pipe.errors import SessionTimeoutError, StepRejectedError
from openenv_pipe.extras.lab.check.rewards import unusable_penalty
from openenv_pipe.extras.lab.episodes import is_complaint
from openenv_pipe.extras.lab.experiment import (
    ends_notes,
    experiment,
    fit_limits,
    for_model,
    tiny_model,
)
from openenv_pipe.extras.lab.inspect import env_block
from openenv_pipe.extras.lab.templates import first_template, following_template, is_plain
from openenv_pipe.extras.lab.trial import Trial, notes_of, problem_of
from openenv_pipe.types import Task

DESCRIPTION = ServerMetadata(
    name="mine",
    text="",
    action={"properties": {"text": {"type": "string"}}},
    first_observation={"properties": {"text": {}}},
    observation={"properties": {"text": {}}},
)
ENV = run_config().env
TASK = Task(id="train/0", split="train", index=0, seed=0)


def played(*rewards, text="ab", done=True, **more):
    """Return an episode with one step for each reward."""
    observation = {"text": text, **more}
    results = [StepResult(observation, None, False)]
    results += [StepResult(observation, reward, False) for reward in rewards]
    results[-1] = StepResult(observation, results[-1].reward, done)
    actions = [{"text": "a"} for _ in rewards]
    return PlayedEpisode(
        task=TASK, results=results, actions=actions, durations_s=[0.01] * len(results)
    )


def tried(*plays, num_sessions=32, failure=None):
    firsts = [play.observations[0] for play in plays]
    return Trial(num_sessions=num_sessions, tools=(), firsts=firsts, plays=plays, failure=failure)


def rendered(template, observation):
    return render_message("user", compile_template("first", template), observation)["content"]


# --- templates -----------------------------------------------------------------------------------


def test_empty_fields_are_shown_only_when_they_have_a_value():
    seen = [{"out": "", "code": 0}, {"out": "hi", "code": None}, {"out": "x", "code": 1}]
    template = first_template(seen)
    assert rendered(template, seen[0]).strip() == "code: 0"
    assert rendered(template, seen[1]).strip() == "out: hi"
    assert rendered(template, seen[2]).strip() == "out: x\ncode: 1"
    assert is_plain([seen])


def test_answers_and_bookkeeping_are_left_out():
    seen = {"question": "why", "correct_answer": "", "episode_id": "7", "step_count": 3}
    assert first_template([seen]) == "{{ question }}"
    assert not is_plain([[seen]])


def test_of_metadata_alone_the_same_fields_are_left_out():
    rules = "x" * 300
    episode = [
        {
            "done": False,
            "metadata": {
                "question": "why",
                "answer": "because",
                "rules": rules,
                "items": ["a", "b"][: turn + 1] + ["c"] * turn,
                "note": None if turn else "hello",
                "step_count": turn,
            },
        }
        for turn in range(2)
    ]
    first = first_template(episode[:1])
    shown = rendered(first, episode[0])
    assert shown == f"question: why\nrules: {rules}\nitems: ['a']\nnote: hello"
    following = following_template([episode])
    assert rendered(following, episode[1]).strip() == "question: why\nitems: ['b', 'c']"
    ended = following_template([[*episode, {"done": True}]])
    assert "question: why" in rendered(ended, episode[1])
    assert rendered(ended, {"done": True}).strip() == ""
    assert not is_plain([episode])
    assert is_plain([[{"metadata": {"a": 1}}, {"metadata": {"a": 2}}]])
    assert first_template([{"metadata": {"a": 1}}]) == "{{ metadata.a }}"
    assert first_template([{"done": False}]) == "{{ metadata }}"


def test_what_a_model_has_been_told_is_not_repeated():
    rules = "x" * 300
    episode = [
        {"rules": rules, "log": ["a", "b"][: turn + 1] + ["c"] * turn, "turn": turn}
        for turn in range(2)
    ]
    assert following_template([episode]) == "log: {{ log[-2:] }}\nturn: {{ turn }}"
    still = [dict(episode[0]), dict(episode[0])]
    assert "rules" in following_template([still]), "nothing moved: nobody knows if it can change"


# --- limits and penalties ------------------------------------------------------------------------


async def limits_of(trial):
    config = run_config()
    return await fit_limits(config.env, build_adapter(config.env.adapter), trial, tiny_model())


async def test_limits_are_those_of_the_texts():
    short = await limits_of(tried(played(0, 0), played(0, 0, 0)))
    # A turn more than the longest took, for an unusable reply.
    assert (short.max_turns, short.max_observation_tokens) == (4, None)
    long = await limits_of(tried(played(0, 0, 0, text="x" * 900)))
    assert long.max_turns == 3 and 3 * 900 < long.max_episode_tokens <= 4096
    assert long.max_observation_tokens is None
    huge = await limits_of(tried(played(0, 0, 0, text="x" * 50_000)))
    assert huge.max_turns >= 2 and huge.max_episode_tokens <= 4096
    assert huge.max_observation_tokens is not None


@pytest.mark.parametrize(
    ("lowest", "expected"), [(0.0, 0.1), (-0.05, 0.1), (-1.0, 1.0), (-0.75, 0.75), (-3.414, 3.5)]
)
def test_silence_never_pays_more_than_the_worst_action(lowest, expected):
    assert unusable_penalty([played(0.5, lowest)]) == expected


async def test_a_server_of_one_session_gets_company():
    config = run_config()
    serving = ServingConfig(env=config.env, host=config.host)
    trial = tried(played(-1.0), num_sessions=1)
    limits = await limits_of(trial)
    keys = experiment("mine", serving, trial, limits)
    assert keys["host"]["num_servers"] > 1 == keys["host"]["sessions_per_server"]
    assert keys["reward"] == {"terms": {"unusable": {"weight": -1.0}}}
    # Other models get neither the limits of the tiny one, nor what teaches random weights.
    assert {"env", "model"}.isdisjoint(keys) and keys["trainer"].keys().isdisjoint({"optimizer"})
    own = for_model(serving, trial, limits, tiny_model())
    assert own["model"]["max_length"] == own["env"]["max_episode_tokens"]
    assert own["trainer"]["optimizer"]["type"] == "muon"


RAISED = StepRejectedError("EXECUTION_ERROR", "not a move")
TUPLE = error_of_frame(
    {
        "type": "error",
        "data": {
            "code": "EXECUTION_ERROR",
            "message": "'tuple' object has no attribute 'model_dump'",
        },
    },
    "step",
    "ws://x",
)


def problem(trial, *, action=DESCRIPTION.action, **env):
    return problem_of(trial, ENV.model_copy(update=env), action)


def test_what_cannot_be_trained_is_said():
    assert problem(tried(played(1.0))) is None
    at_once = played(text="no API key")
    at_once.results[0] = StepResult({"text": "no API key"}, None, True)
    assert "done at its reset" in problem(tried(at_once))
    assert "no API key" in problem(tried(at_once))
    silent = played(done=False)
    assert "no answer" in problem(tried(silent, failure=SessionTimeoutError("no answer")))
    assert problem(tried(played(1.0), failure=SessionTimeoutError("no answer"))) is None
    assert "no fields" in problem(tried(played(1.0)), action={"properties": {"metadata": {}}})


def test_an_environment_that_takes_no_action_cannot_be_trained():
    def rejecting(*rejections):
        play = played(done=False)
        play.rejections += rejections
        return tried(play)

    assert "of 2 random actions, all raised on the server" in problem(rejecting(RAISED, RAISED))
    assert problem(rejecting(RAISED), step_exception="unusable") is None, "the user knows better"
    invalid = StepRejectedError("VALIDATION_ERROR", "extra field")
    assert "none is valid for the server" in problem(rejecting(invalid))
    wrong = problem(rejecting(TUPLE), step_exception="unusable")
    assert "step() returned a tuple; OpenEnv wants the observation alone" in wrong
    assert "step_exception" not in env_block(DESCRIPTION, ENV, rejecting(RAISED))
    some = played(1.0)
    some.rejections.append(RAISED)
    assert problem(tried(some)) is None
    assert "step_exception: unusable" in env_block(DESCRIPTION, ENV, tried(some))
    assert "1 of 2 random actions raised" in " ".join(notes_of(tried(some), ENV))


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ({"text": "go north"}, "a task begins with"),
        ({"text": "", "metadata": {"error": "no task"}}, "reads like a complaint"),
        ({"text": "The keyword `task_id` is missing"}, "reads like a complaint"),
        ({"text": "KeyError: 'task'"}, "reads like a complaint"),
        ({"text": "Find the error in this program: " + "x" * 600}, "a task begins with"),
    ],
)
def test_the_words_of_a_reset_are_shown(first, expected):
    play = played(1.0)
    play.results[0] = StepResult(first, None, False)
    assert any(expected in note for note in notes_of(tried(play), ENV))
    assert is_complaint(first) is ("complaint" in expected)


def test_a_reward_that_is_always_null_is_noted():
    assert any("always null" in note for note in notes_of(tried(played(None, None)), ENV))
    assert not any("null" in note for note in notes_of(tried(played(None, 0.0)), ENV))


# --- ends ----------------------------------------------------------------------------------------


async def limits_and_notes(*plays):
    trial = tried(*plays)
    limits = await limits_of(trial)
    env = ENV.model_copy(update=limits.keys)
    return limits, list(ends_notes(trial, env))


async def test_games_can_end_within_the_written_limits():
    """A game of 20 turns of 400 bytes is longer than 4096 tokens."""
    limits, notes = await limits_and_notes(played(*[0] * 20, text="x" * 400))
    assert (limits.max_turns, notes) == (20, [])
    assert limits.max_observation_tokens is None or limits.max_observation_tokens > 400
    assert limits.max_episode_tokens > 20 * 400


async def test_games_that_cannot_end_within_the_limits_are_noted():
    limits, notes = await limits_and_notes(played(*[0] * 60, text="x" * 2000))
    assert limits.max_turns < 60
    assert "0 of 1 random episodes were done within" in notes[0]
    _, notes = await limits_and_notes(played(*[0] * 64, done=False))
    assert "no random episode was done within 64 turns" in notes[0]
    lucky = [played(*[0] * turns, done=turns < 64) for turns in (2, 40, 64, 64)]
    limits, notes = await limits_and_notes(*lucky)
    assert limits.max_turns == ENV.max_turns, "most do not end"
    assert "1 of 4 random episodes were done" in notes[0]
