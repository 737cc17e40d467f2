"""Programs that play episodes in tests: real processes, with the standard library's HTTP client."""

from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fakes import FakeHost, Play, all_episodes, rollout_context, run_config

from openenv_pipe.config.schema import LocalEngineConfig, RunConfig
from openenv_pipe.engines import Completion, TokenRequest
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.extras.agents.programs.player import serving_programs
from openenv_pipe.extras.agents.schema import ProgramAgentConfig
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.rollout import RolloutContext, play_groups
from openenv_pipe.types import Episode, Finish

# What every program begins with.
CLIENT = """
import http.client, json, os, signal, sys, time, urllib.parse

def post(url, body, key=None):
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    key = key or os.environ["OPENAI_API_KEY"]
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", parts.path, json.dumps(body).encode(), headers)
    response = connection.getresponse()
    return response.status, response.read().decode()

def ask(messages, key=None, **options):
    body = {"model": "policy", "messages": messages, **options}
    status, text = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)
    assert status == 200, (status, text)
    return json.loads(text)["choices"][0]["message"]

def step(**action):
    status, text = post(os.environ["OPENENV_URL"] + "/step", {"action": action})
    return json.loads(text) if status == 200 else {"rejected": text}

def user(text):
    return {"role": "user", "content": text}

task = json.load(open(os.environ["OPENENV_TASK_FILE"]))
"""


def agent_config(script: str = "", **changes: Any) -> ProgramAgentConfig:
    """Return the configuration of a program of `CLIENT` and `script`."""
    values = {
        "type": "program",
        "command": ["{python}", "-S", "-c", CLIENT + script],
        "variables": {},
        "files": {},
        "timeout_s": 30.0,
        "max_calls": 32,
        "max_tokens": None,
        "grace_s": 2.0,
        "max_output_mb": 1,
        "exit_codes": [0],
        "reward_from": "environment",
        "sandbox": {"type": "none"},
    }
    return ProgramAgentConfig.model_validate({**values, **changes})


class RepliesEngine:
    """Gives the next of some replies to each request, and keeps both."""

    capabilities = LocalEngineConfig.capabilities
    max_episodes = 64

    def __init__(self, chat: ChatFormat, *replies: str) -> None:
        self.prompts: list[list[int]] = []
        self.completions: list[Completion] = []
        self.num_concurrent: list[int] = []  # of each request
        self._chat = chat
        self._replies = replies

    def begin_rollouts(self, num_episodes: int, limit: int) -> int:
        """There is nothing to prepare."""
        return 0

    async def generate(self, request: TokenRequest) -> Completion:
        self.num_concurrent.append(request.num_concurrent)
        reply = self._replies[min(len(self.prompts), len(self._replies) - 1)]
        token_ids = self._chat.reply_ids(reply)
        self.prompts.append([*request.prompt_ids])
        self.completions.append(
            Completion(
                token_ids=token_ids,
                logprobs=[-0.25 - 0.5 * place for place in range(len(token_ids))],
                finish=Finish.STOP,
                policy_versions=[3],
            )
        )
        return self.completions[-1]

    def end_episode(self, episode: int) -> None:
        """There is nothing to free."""


def two_steps(seed: int, number: int, action: Mapping[str, Any]) -> StepResult:
    """An environment that is done after two steps, each worth 0.5."""
    return StepResult({"text": f"seen {number}"}, 0.5 if number else None, number == 2)


@asynccontextmanager
async def programs_context(
    agent: ProgramAgentConfig,
    folder: Path,
    *,
    chat: ChatFormat | None,
    engine: Any,
    level: str = "tokens",
    play: Play = two_steps,
    changes: Mapping[str, Any] | None = None,
):
    """Yield a rollout context whose episodes are played by a program."""
    config: RunConfig = run_config({"env.max_episode_tokens": 400, **(changes or {})})
    context = rollout_context(config, FakeHost(play), chat=chat, engine=engine)
    async with serving_programs(context.loop, agent, folder, level=level) as programs:
        yield replace(context, agents=programs)


async def play_episodes(
    context: RolloutContext, *, num_tasks: int = 1, group_size: int = 1
) -> list[Episode]:
    tasks = [context.splits.train[index] for index in range(num_tasks)]
    groups = await play_groups(
        context, tasks, group_size=group_size, temperature=1.0, seed=0, label="step 1"
    )
    return all_episodes(groups)
