"""`openenv-pipe env play`: play in the model's place, or on the server's own page.

The event loop has its own thread, so that sessions stay alive while the person thinks and Ctrl-C
interrupts the wait.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from anyio.from_thread import BlockingPortal, start_blocking_portal

from openenv_pipe.commands.recorded_play import PlayedEpisode, RecordedPlayer
from openenv_pipe.config.schema import EnvConfig, RewardConfig, ScriptedEngineConfig
from openenv_pipe.engines.base import ObservationRequest, StaticEngine, TextReply
from openenv_pipe.environments.adapters import Adapter, adapter_for
from openenv_pipe.environments.adapters.base import Ask
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.environments.client.session import EpisodeSession
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.hosts.process import ProcessHost
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.lab.targets import Target, one_server, open_tasks
from openenv_pipe.rewards import Scorer
from openenv_pipe.system.tasks import awaited
from openenv_pipe.types import Action, Episode, Group, Message, Observation, Opening, Status, Task

if TYPE_CHECKING:
    from openenv_pipe.extras.lab.cli import PersonAtTerminal

POLL_S = 1.0


def play_environment(
    target: Target,
    person: "PersonAtTerminal",
    *,
    split: Literal["train", "eval"],
    index: int,
    seed: int | None,
    raw: bool,
) -> None:
    """Play one episode until it ends, the person's input ends, or Ctrl-C.

    seed: replaces the task's own. raw: show observations without the adapter's messages.

    Raises ConfigError, HostError and SessionError.
    """
    env = target.serving.env
    server = one_server(target.serving)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(server) as host:
        task = portal.call(_find_task, env, split, index, host)
        if seed is not None:
            task = replace(task, seed=seed)
        adapter = portal.call(adapter_for, env.adapter, host.urls, host.access)
        episode = play_by_hand(portal, host, ShownAdapter(adapter, person, raw=raw), env, task)
        if target.reward and not episode.failed:
            person.show(portal.call(_reward_text, target.reward, env, episode), "")


async def _find_task(
    env: EnvConfig, split: Literal["train", "eval"], index: int, host: Host
) -> Task:
    tasks = await open_tasks(env, split, host)
    if not 0 <= index < len(tasks):
        raise ConfigError(f"--index {index}: the {split} split has tasks 0 to {len(tasks) - 1}")
    return tasks[index]


async def _reward_text(config: RewardConfig, env: EnvConfig, episode: Episode) -> str:
    """Return every part of the reward that training would give the episode, line by line."""
    group = Group(id="play", task=episode.task, episodes=[episode])
    await Scorer(config, env.success_reward).score(group)
    lines = ["the terms of the reward in training, with estimated numbers of tokens:"]
    for name, value in episode.reward_terms.items():
        term = config.terms.get(name)
        lines.append(f"  {name} {value:.4g}{f', weight {term.weight:g}' if term else ''}")
    left_out = [name for name in config.terms if name not in episode.reward_terms]
    why = episode.unscored or "a judge or a verifier decides it, which is not asked here"
    lines += [f"  {name} has no value: {why}" for name in left_out]
    total = f"reward {episode.reward:.4g}" if episode.is_scored else "no reward"
    return "\n".join([*lines, f"  {total}"])


class ShownAdapter:
    def __init__(self, adapter: Adapter, person: "PersonAtTerminal", *, raw: bool) -> None:
        """raw: show observations in place of the messages that are made from them."""
        self.read = adapter.read
        self._adapter = adapter
        self.person = person
        self._raw = raw

    async def open(self, observation: Observation, ask: Ask) -> Opening:
        opening = await self._adapter.open(observation, ask)
        for tool in opening.tools:
            self.person.show(f"tool {json.dumps(tool['function'])}", "note")
        self._show(observation, opening.messages)
        return opening

    async def follow(self, observation: Observation) -> list[Message]:
        messages = await awaited(self._adapter.follow(observation))
        self._show(observation, messages)
        return messages

    async def follow_last(self, observation: Observation) -> None:
        """Show the last observation, but no empty messages."""
        messages = await awaited(self._adapter.follow(observation))
        self._show(observation, [each for each in messages if each["content"].strip()])

    async def reject(self, why: str) -> list[Message]:
        messages = await awaited(self._adapter.reject(why))
        self._show_messages(messages)
        return messages

    def _show(self, observation: Observation, messages: Sequence[Message]) -> None:
        if self._raw:
            self.person.show(json.dumps(observation, indent=2, ensure_ascii=False), "")
        else:
            self._show_messages(messages)

    def _show_messages(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.person.show(f"[{message['role']}]", "note")
            self.person.show(message["content"], message["role"])


class PersonEngine(StaticEngine):
    capabilities = ScriptedEngineConfig.capabilities
    max_episodes = 1

    def __init__(self) -> None:
        self.waiting: SimpleQueue[asyncio.Future[str] | None] = SimpleQueue()  # None: the end

    async def generate(self, request: ObservationRequest) -> TextReply:
        reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiting.put(reply)
        return TextReply(text=await reply)


class ShownPlayer(RecordedPlayer):
    """Plays the episode of a person by the loop of training, and shows each reward."""

    _adapter: ShownAdapter

    async def _step(self, session: EpisodeSession, action: Action) -> StepResult:
        result = await super()._step(session, action)
        self._adapter.person.show(f"reward {result.reward or 0.0:.4g}", "reward")
        if result.done:
            await self._adapter.follow_last(result.observation)
        return result


def play_by_hand(
    portal: BlockingPortal, host: Host, adapter: ShownAdapter, env: EnvConfig, task: Task
) -> Episode:
    """Play until the end, env.max_turns replies, the end of the input, or Ctrl-C.

    Raises SessionError.
    """
    engine, record = PersonEngine(), PlayedEpisode(task=task)
    player = ShownPlayer(env, engine, adapter, record)

    async def begin() -> asyncio.Task[Status]:
        async def play() -> Status:
            async with host.session() as session:
                return await player.play_in(session)

        playing = asyncio.create_task(play())
        playing.add_done_callback(lambda _: engine.waiting.put(None))
        return playing

    async def wait() -> None:
        await asyncio.wait([playing])

    playing = portal.call(begin)
    try:
        while (wanted := engine.waiting.get()) is not None:
            portal.call(wanted.set_result, adapter.person.reply())
    except (KeyboardInterrupt, EOFError):
        portal.call(playing.cancel)
    portal.call(wait)
    status = None if playing.cancelled() else playing.result()
    episode = replace(player.episode_so_far, status=status or Status.TURN_LIMIT)
    adapter.person.show(_ending(env, record, status, len(episode.turns)), "")
    return episode


def _ending(env: EnvConfig, record: PlayedEpisode, status: Status | None, num_turns: int) -> str:
    """Say how an episode has ended. status: None if the person has stopped it."""
    if record.failure is not None:
        return (
            f"\nthe episode failed, as it would in training: {record.failure}\nwith "
            "env.step_exception=unusable such an exception counts as the policy's mistake, and "
            "the episode continues"
        )
    how = {
        None: "stopped before the end",
        Status.DONE: f"done after {num_turns} turns",
        Status.ANSWERED: f"ended by an answer after {num_turns} turns",
        Status.TURN_LIMIT: f"ended by env.max_turns={env.max_turns}",
    }[status]
    success = ", a success" if record.reward >= env.success_reward else ""
    return f"\n{how}, with reward {record.reward:.4g} in all{success}"


def serve_page(target: Target, on_ready: Callable[[str], None]) -> None:
    """Serve the server's own web page until Ctrl-C. Raises ConfigError and HostError.

    on_ready: called with the page's address.
    """
    if target.serving.host.type != "process":
        raise ConfigError(
            "--web starts a server with its page enabled, which only host=process can do; "
            f"this target is on host={target.serving.host.type}"
        )
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve_page(target, on_ready))


async def _serve_page(target: Target, on_ready: Callable[[str], None]) -> None:
    variables = {"ENABLE_WEB_INTERFACE": "true"}
    async with one_server(target.serving, variables=variables) as host:
        assert isinstance(host, ProcessHost)
        on_ready(f"{host.urls[0]}/web?key={host.key}")
        while host.urls:
            await asyncio.sleep(POLL_S)
        async with host.session():  # raises if the server died
            pass
