"""Environment servers that misbehave in more than two hundred ways, against all that talks to them.

Each behaviour ends in an error of the package, whose message can be read, or in a result; never in
another exception, and never in silence. The waits of the client are short here, so that
the test is, and nothing is asserted about how long they take.
"""

import asyncio
import random
import traceback
import unicodedata
from pathlib import Path

import pytest
import yaml
from fakes import SPLITS, TEMPLATES, run_config

from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.environments.adapters import adapter_for
from openenv_pipe.environments.client import metadata
from openenv_pipe.environments.random_policy import random_action
from openenv_pipe.environments.tasks import RangeTasks, Splits
from openenv_pipe.errors import PipeError
from openenv_pipe.extras.attach.host import AttachHost
from openenv_pipe.extras.attach.schema import AttachHostConfig
from openenv_pipe.extras.lab import targets, trial
from openenv_pipe.extras.lab.inspect import env_block, inspect_environment
from openenv_pipe.extras.lab.targets import find_target
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.rewards import Scorer
from openenv_pipe.rollout import RolloutContext, collect_groups
from openenv_pipe.rollout.episode import LocalRunner
from openenv_pipe.rollout.metrics import summarise_groups
from openenv_pipe.runs.episodes import read_episodes, write_episodes
from openenv_pipe.system.untrusted_text import for_people
from tests.hostile_server import HostileServer
from tests.stub_server import started

CHAT = ChatFormat(build_tokenizer())
WAIT_S = 1.0  # of the client, for each answer
LIMIT_S = 240.0  # of one behaviour, which no load reaches
NUM_AT_ONCE = 16
NUM_INSPECTED = 8  # by the whole command, which composes YAML each time
ADAPTERS = [
    {"type": "json", "hidden_fields": [], **TEMPLATES},
    {"type": "tool", "plain_reply": "final", **TEMPLATES},
    {
        "type": "text",
        **TEMPLATES,
        "first": "{{ text }}",
        "following": "{{ text }}",
        "pattern": r"(?s)^(?P<text>.*)$",
    },
]


@pytest.fixture(scope="module")
def server():
    server = HostileServer()
    with server.running():
        yield server


def config_for(adapter):
    return run_config(
        {
            "env.adapter": adapter,
            "env.reset_timeout_s": WAIT_S,
            "env.step_timeout_s": WAIT_S,
            "env.max_message_mb": 1,
            "env.max_turns": 2,
            "env.max_reply_tokens": 200,
            "env.max_episode_tokens": 3000,
            "model.max_length": 4096,
        }
    )


def reply_at_random(observations, draw, *, opening):
    if opening.tools or opening.action_schema:
        return random_action(observations, draw, opening=opening)
    return "hello"


def attached(url, env):
    """A host of two sessions with the server at `url`."""
    config = AttachHostConfig(
        type="attach",
        urls=[url],
        sessions_per_server=2,
        headers={},
        verify_tls=True,
        ca_file=None,
        connect_timeout_s=WAIT_S,
        max_outage_s=0.0,
    )
    return started(AttachHost(env, config, Path("logs")))


async def play(url, adapter, folder):
    """Play two episodes at once, and use them as a step does. Return how many count."""
    config = config_for(adapter)
    async with attached(url, config.env) as host:
        context = RolloutContext(
            env=config.env,
            loop=LocalRunner(host, await adapter_for(config.env.adapter, host.urls, host.access)),
            splits=Splits(**{each: RangeTasks(each, config.env.tasks.train) for each in SPLITS}),
            chat=CHAT,
            engine=ScriptedEngine(reply_at_random),
            scorer=Scorer(config.reward, config.env.success_reward),
        )
        groups = await collect_groups(
            context, [context.splits.train[0]], group_size=2, temperature=1.0, seed=0, label="step"
        )
    assert all(value == value for value in summarise_groups(groups).values())  # no NaN
    write_episodes(folder / "episodes.gz", groups)
    assert len(read_episodes(folder / "episodes.gz")) == 1
    return len(groups[0].scored)


async def inspect(url):
    """Do what `env inspect` does before it composes what it has written."""
    env = config_for(ADAPTERS[0]).env
    async with attached(url, env) as host:
        description = await metadata.fetch_metadata(host.urls[0], host.access)
        tasks = RangeTasks("train", env.tasks.train)
        played = await trial.try_environment(
            env, host, tasks, description.action, notify=lambda _: None
        )
    block = yaml.safe_load(env_block(description, env, played))
    assert 0 < len(block["name"]) <= 60


def problem_of(error):
    """Return what is wrong with the way in which a behaviour ended; None: nothing."""
    if not isinstance(error, PipeError):
        return "".join(traceback.format_exception(error))[-3000:]
    shown = for_people(str(error))
    has_controls = any(unicodedata.category(sign) == "Cc" for sign in shown.replace("\n", ""))
    if has_controls or not 10 < len(str(error)) < 4000:
        return f"no message that can be read: {shown!r:.500}"
    return None


async def attempt(work):
    """Return what is wrong with the way in which the work ended; None: nothing."""
    try:
        async with asyncio.timeout(LIMIT_S):
            await work
    except Exception as error:
        return problem_of(error)
    return None


async def test_every_behaviour_ends_in_an_error_of_ours_or_in_a_result(
    server, monkeypatch, tmp_path
):
    monkeypatch.setattr(metadata, "TIME_LIMIT_S", WAIT_S)
    monkeypatch.setattr(targets, "SLOT_LIMIT_S", 2)
    for name in ("NUM_SESSIONS", "NUM_PLAYS"):
        monkeypatch.setattr(trial, name, 2)
    room = asyncio.Semaphore(NUM_AT_ONCE)

    async def try_out(number):
        behaviour, url = server.behaviours[number], server.url(number)
        adapter = random.Random(number).choice(ADAPTERS)
        folder = tmp_path / str(number)
        folder.mkdir()
        async with room:
            problems = [await attempt(play(url, adapter, folder))]
            if behaviour.point in ("none", "schema", "step"):
                problems.append(await attempt(inspect(url)))
        return [
            f"{behaviour.point}, {behaviour.name}, adapter {adapter['type']}: {problem}"
            for problem in problems
            if problem
        ]

    numbers = range(len(server.behaviours))
    assert len(numbers) >= 200
    found = await asyncio.gather(*map(try_out, numbers))
    problems = [problem for each in found for problem in each]
    assert not problems, f"{len(problems)} problems\n" + "\n".join(problems[:10])


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter["type"])
async def test_without_a_fault_both_episodes_count(server, adapter, tmp_path, monkeypatch):
    """Otherwise the test above might try nothing."""
    monkeypatch.setattr(f"{__name__}.WAIT_S", LIMIT_S)
    assert await play(server.url(0), adapter, tmp_path) == 2
    await inspect(server.url(0))


def test_inspect_itself_ends_as_well(server, monkeypatch):
    monkeypatch.setattr(metadata, "TIME_LIMIT_S", WAIT_S)
    limits = [
        *(f"env.reset_timeout_s={WAIT_S}", f"env.step_timeout_s={WAIT_S}"),
        f"host.connect_timeout_s={WAIT_S}",
    ]
    numbers = random.Random(0).sample(range(len(server.behaviours)), NUM_INSPECTED)
    problems = []
    for number in numbers:
        behaviour = server.behaviours[number]
        try:
            inspect_environment(find_target(server.url(number), limits), None)
        except Exception as error:
            if problem := problem_of(error):
                problems.append(f"{behaviour.point}, {behaviour.name}: {problem}")
    assert not problems, "\n".join(problems)
