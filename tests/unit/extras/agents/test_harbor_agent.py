"""The reward of a program's episode from what Harbor leaves, with a program in its place."""

import json
from functools import partial

import pytest
from programs import RepliesEngine, agent_config, play_episodes, programs_context

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.agents.programs.player import read_verdict
from openenv_pipe.extras.agents.programs.program import check_program
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.types import Status

CHAT = ChatFormat(build_tokenizer())
TASKS = ("conf=harbor", "model=tiny")
FOLDERS = ("env.tasks.train.path=train", "env.tasks.eval.path=eval")


def result(rewards=None, exception=None):
    verifier = None if rewards is None else {"rewards": rewards}
    return {"verifier_result": verifier, "exception_info": exception}


@pytest.mark.parametrize(
    ("content", "reward", "problem"),
    [
        (result({"reward": 0.5, "tests": 3}), 0.5, ""),
        (result({"reward": 0}, {"exception_type": "AgentTimeoutError"}), 0.0, ""),
        (result(None, {"exception_type": "E", "exception_message": "why"}), None, "E: why"),
        (result({"tests": 3}), None, r'wrote {"tests": 3}, expected a number named reward'),
        (result({"reward": "1"}), None, "expected a number"),
        (result({"reward": True}), None, "expected a number"),
        (result({"reward": float("nan")}), None, "expected a number"),
        (result({"reward": 10**400}), None, "expected a number"),
        (result({"reward": 1e300}), None, "expected a number"),
        ([], None, "the verifier wrote {}"),
    ],
)
def test_the_verifiers_number_is_the_reward_and_its_absence_is_no_zero(content, reward, problem):
    verdict = read_verdict(json.dumps(content).encode())
    assert verdict.reward == reward
    assert problem in verdict.problem
    assert bool(verdict.problem) == (reward is None)


def test_a_damaged_result_is_no_reward():
    assert "not JSON" in read_verdict(b'{"verifier').problem


LEAVE = """
ask([user("a")])
folder = sys.argv[1] + "/job/trial"
os.makedirs(folder)
open(folder + "/result.json", "w").write(sys.argv[2])
"""


async def played(tmp_path, script, content, **changes):
    agent = agent_config(script, reward_from="harbor", **changes)
    command = [*agent.command, "{results}", json.dumps(content)]
    agent = agent.model_copy(update={"command": command})
    engine = RepliesEngine(CHAT, "an answer")
    async with programs_context(agent, tmp_path, chat=CHAT, engine=engine) as context:
        (episode,) = await play_episodes(context)
    assert list((tmp_path / "programs").iterdir()) == []
    return episode


@pytest.fixture
def play(tmp_path):
    return partial(played, tmp_path)


async def test_the_reward_is_a_last_step_of_the_episode(play):
    episode = await play(LEAVE, result({"reward": 0.5, "tests": 3}))
    assert episode.status is Status.ANSWERED
    (step,) = episode.turns[-1].steps
    assert step.reward == 0.5
    assert step.observation["reported"]["metrics"] == {"reward": 0.5, "tests": 3.0}


@pytest.mark.parametrize(
    ("script", "changes", "words"),
    [
        (LEAVE, {}, "status answered: VerifierTimeoutError: late"),
        ("ask([user('a')])", {}, "0 results of trials"),
        (LEAVE + "time.sleep(60)", {"timeout_s": 0.5}, "no reward, after status time_limit"),
    ],
)
async def test_without_a_reward_the_episode_has_failed(play, script, changes, words):
    exception = {"exception_type": "VerifierTimeoutError", "exception_message": "late"}
    episode = await play(script, result(None, exception), **changes)
    assert episode.status is Status.NO_REWARD
    assert episode.status.is_failure
    assert words in episode.error


def test_the_preset_names_the_task_the_model_and_how_to_install_harbor(monkeypatch, tmp_path):
    agent = compose([*TASKS, *FOLDERS]).config.agent
    assert agent.command[:2] == ["harbor", "run"]
    for part in ("{start_folder}/{prompt}", "openai/{model}", "api_base={base_url}", "{results}"):
        assert part in agent.command
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="uv tool install harbor"):
        check_program(agent)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("agent.reward_from=environment", "only clients and Harbor can play"),
        ("agent/sandbox=docker", "Harbor starts the containers"),
    ],
)
def test_what_harbor_cannot_be_combined_with_is_rejected(change, words):
    with pytest.raises(ConfigError, match=words):
        compose([*TASKS, *FOLDERS, change, *(["agent.sandbox.image=x"] if "/" in change else [])])
