"""`openenv-pipe env play`: play in the model's place, or on the server's own page.

The event loop has its own thread, so that sessions stay alive while the person thinks and Ctrl-C
interrupts the wait.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from openenv_pipe.commands.env.episodes import PlayedEpisode, start_episode, take_step
from openenv_pipe.commands.env.targets import Target, one_server, open_tasks
from openenv_pipe.config.schema import EnvConfig, RewardConfig
from openenv_pipe.engines.base import estimate_tokens
from openenv_pipe.environments.adapters import Adapter, UnusableReply, adapter_for
from openenv_pipe.environments.client.session import Session, step_aside
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.hosts.process import ProcessHost
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.reply_reader import PLAIN_READER
from openenv_pipe.rewards import Scorer
from openenv_pipe.system.tasks import awaited
from openenv_pipe.types import (
    Action,
    Episode,
    Finish,
    Group,
    Message,
    Observation,
    Status,
    Step,
    Task,
    Turn,
    Usage,
)

POLL_S = 1.0
Result = TypeVar("Result")


class Person(Protocol):
    """The person who plays."""

    def show(self, text: str, kind: str) -> None:
        """Show a text. kind: a role of messages, `reward`, `note`, or empty."""

    def reply(self) -> str:
        """Return the next reply. Raises EOFError at the end of the input."""


def play_environment(
    target: Target,
    person: Person,
    *,
    split: Literal["train", "eval"],
    index: int,
    seed: int | None,
    raw: bool,
) -> None:
    """Play one episode until it ends, the person's input ends, or Ctrl-C.

    seed: replaces the task's own. raw: show observations without the adapter's messages.

    Raises:
        ConfigError: The target or the task does not exist.
        HostError, SessionError: The server does not start, or the session failed.
    """
    env = target.serving.env
    server = one_server(target.serving)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(server) as host:
        task = portal.call(_find_task, env, split, index, host)
        if seed is not None:
            task = replace(task, seed=seed)
        adapter = portal.call(adapter_for, env.adapter, host.urls, host.access)
        with portal.wrap_async_context_manager(host.session()) as session:
            game = Game(portal, session, adapter, env, person, raw=raw)
            game.begin(task)
            game.play()
            if target.reward and not game.has_failed:
                person.show(portal.call(_told_reward, target.reward, env, game.episode), "")


async def _find_task(
    env: EnvConfig, split: Literal["train", "eval"], index: int, host: Host
) -> Task:
    tasks = await open_tasks(env, split, host)
    if not 0 <= index < len(tasks):
        raise ConfigError(f"--index {index}: the {split} split has tasks 0 to {len(tasks) - 1}")
    return tasks[index]


async def _told_reward(config: RewardConfig, env: EnvConfig, episode: Episode) -> str:
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
    return "\n".join([*lines, f"  reward {episode.reward:.4g}"])


class Game:
    """One episode with a person."""

    def __init__(
        self,
        portal: BlockingPortal,
        session: Session,
        adapter: Adapter,
        env: EnvConfig,
        person: Person,
        *,
        raw: bool,
    ) -> None:
        self._portal = portal
        self._session = session
        self._adapter = adapter
        self._env = env
        self._raw = raw
        self._person = person

    def begin(self, task: Task) -> None:
        """Reset to the task, and show the first messages."""
        self._play: PlayedEpisode = self._portal.call(start_episode, self._session, task, self._env)
        (observation,) = self._play.observations
        self.episode = Episode(task=task, member=0, seed=0, first_observation=observation)
        ask = partial(step_aside, self._session, self._env.step_timeout_s)
        opening = self._portal.call(self._adapter.open, observation, ask)
        self._tools = opening.tools
        for tool in opening.tools:
            self._person.show(f"tool {json.dumps(tool['function'])}", "note")
        self._show(observation, opening.messages)

    @property
    def has_failed(self) -> bool:
        """Whether an exception of the environment ended the episode."""
        return self._play.failure is not None

    def play(self) -> None:
        """Play until the end, env.max_turns replies, the end of the input, or Ctrl-C."""
        how = "stopped before the end"
        with suppress(KeyboardInterrupt, EOFError):
            how = self._take_turns()
        self.episode.status = Status.DONE if self._play.done else Status.TURN_LIMIT
        if (failure := self._play.failure) is not None:
            self._person.show(
                f"\nthe episode failed, as it would in training: {failure}\nwith "
                "env.step_exception=unusable such an exception counts as the player's mistake, and "
                "the episode continues",
                "",
            )
            return
        total = self._play.reward
        success = ", a success" if total >= self._env.success_reward else ""
        self._person.show(f"\n{how}, with reward {total:.4g} in all{success}", "")

    def _take_turns(self) -> str:
        """Play the turns; return how the episode ended."""
        for turn in range(self._env.max_turns):
            if self._play.done:
                return f"done after {turn} turns"
            self._take_turn(self._person.reply())
            if self._play.failure is not None:
                return "failed"
        limit = self._env.max_turns
        return f"done after {limit} turns" if self._play.done else f"ended by env.max_turns={limit}"

    def _take_turn(self, reply: str) -> None:
        """Take the reply's steps; an unusable reply gets the adapter's answer."""
        self.episode.turns.append(_turn_of(reply))
        unusable: UnusableReply | None = None
        try:
            read = PLAIN_READER.read(reply, self._tools)
            actions = self._portal.call(_answer, self._adapter.read, read)
        except UnusableReply as error:
            actions, unusable = error.actions, error
        for action in actions:
            self._step(action)
            if self._play.is_over:
                return
        if unusable is not None:
            self._refuse(unusable)

    def _step(self, action: Action) -> None:
        play = self._play
        num_refused = len(play.refusals)
        self._portal.call(take_step, self._session, play, action, self._env)
        if play.failure is not None:
            return
        if len(play.refusals) > num_refused:
            self._refuse(play.refusals[-1])
            return
        result = play.results[-1]
        step = Step(action=action, observation=result.observation, reward=result.reward or 0.0)
        self.episode.turns[-1].steps.append(step)
        self._person.show(f"reward {result.reward or 0.0:.4g}", "reward")
        messages = self._portal.call(_answer, self._adapter.follow, result.observation)
        if play.done:  # A model would not be shown further messages.
            messages = [each for each in messages if each["content"].strip()]
        self._show(result.observation, messages)

    def _refuse(self, why: Exception) -> None:
        self.episode.turns[-1].unusable = str(why)
        self._show_messages(self._portal.call(_answer, self._adapter.refuse, str(why)))

    def _show(self, observation: Observation, messages: Sequence[Message]) -> None:
        if not self._raw:
            self._show_messages(messages)
            return
        self._person.show(json.dumps(observation, indent=2, ensure_ascii=False), "")

    def _show_messages(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._person.show(f"[{message['role']}]", "note")
            self._person.show(message["content"], message["role"])


async def _answer(method: Callable[[Any], Result | Awaitable[Result]], argument: Any) -> Result:
    """Call a method of an adapter, which may be a coroutine function."""
    return await awaited(method(argument))


def _turn_of(reply: str) -> Turn:
    """Return a turn without token ids, whose number is estimated."""
    return Turn(
        prompt_ids=[],
        completion_ids=[],
        logprobs=[],
        finish=Finish.STOP,
        policy_versions=[],
        reply=reply,
        usage=Usage(
            num_prompt_tokens=0, num_completion_tokens=estimate_tokens([{"content": reply}])
        ),
    )


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
