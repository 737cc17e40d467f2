"""A game of several players in one session, in which each of them plays an episode of its own.

To a player, the others are part of its environment: its step ends when it is to move again or the
game is over, with the observation of that moment and its rewards since its last step. It is shown
no other observation, and no words of the others.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from openenv_pipe.config.schema import EnvConfig, PlayersConfig
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.environments.client.session import EpisodeSession
from openenv_pipe.environments.hosts.base import Host, SessionLender
from openenv_pipe.errors import SessionError
from openenv_pipe.system.tasks import start_in
from openenv_pipe.system.untrusted_text import quoted
from openenv_pipe.system.user_numbers import MAX_REWARD
from openenv_pipe.types import Episode, Observation, Status, Task

Play = Callable[[SessionLender], Coroutine[Any, Any, Episode]]


class Seat:
    """What one player has in place of a session: its turns in the session of the game."""

    def __init__(self, game: "Game") -> None:
        self.reward = 0.0  # since its last result
        self._game = game
        self._result: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EpisodeSession]:
        """Lend the seat to its player. The game is over when one of them leaves."""
        try:
            yield self
        except SessionError as error:
            self._game.fail(error)
            raise
        self._game.end()

    async def reset(self, keywords: Mapping[str, Any], timeout_s: float) -> StepResult:
        """Wait for the first turn: the game resets the session. Raises SessionError."""
        result = await self._result
        self.reward += result.reward or 0.0  # of moves before its first: part of its first step
        return result

    async def step(self, action: Mapping[str, Any], timeout_s: float) -> StepResult:
        """Make a move, and wait for the next turn or the end. Raises as `Session.step`."""
        result = await self._game.session.step(action, timeout_s)
        self._result = asyncio.get_running_loop().create_future()
        self._game.pass_on(result)
        return await self._result

    async def ask(
        self, kind: str, answer_kind: str, data: Mapping[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        """Ask the session something other than a move. See `Session.ask`."""
        return await self._game.session.ask(kind, answer_kind, data, timeout_s)

    def give(self, observation: Observation, *, done: bool) -> None:
        """Give the player its turn or its last result, unless it already has one."""
        if not self._result.done():
            self._result.set_result(StepResult({**observation}, self.reward, done))
            self.reward = 0.0

    def fail(self, error: SessionError) -> None:
        if not self._result.done():
            self._result.set_exception(error)
            self._result.exception()  # asyncio reports one that nobody has looked at


class Game:
    """A session that players share; one of them is to move at a time."""

    session: EpisodeSession

    def __init__(self, env: EnvConfig, players: PlayersConfig) -> None:
        self._env = env
        self._players = players
        self._seats = {name: Seat(self) for name in players.roles}
        self._last = StepResult({}, None, done=False)
        self._error: SessionError | None = None

    async def play(self, host: Host, task: Task, plays: Mapping[str, Play]) -> list[Episode]:
        """Play a task in a session of the host; return the players' episodes in their order.

        If a limit ends the episode of one player, it ends those of all, with the same status.

        plays: play the episode of each player, by its name, in the sessions that they are given.
        """
        async with asyncio.TaskGroup() as group:
            playing = [start_in(group, play(self._seats[name])) for name, play in plays.items()]
            try:
                async with host.session() as self.session:
                    keywords = {**task.reset, "seed": task.seed}
                    self.pass_on(await self.session.reset(keywords, self._env.reset_timeout_s))
                    await asyncio.wait(playing)
                    if self._error is not None:  # The host does not lend the session again.
                        raise self._error
            except SessionError as error:
                self.fail(error)
        episodes = [each.result() for each in playing]
        ends = (episode.status for episode in episodes if episode.status is not Status.DONE)
        end = next(ends, Status.DONE)
        for episode in episodes:
            episode.status = end
        return episodes

    def pass_on(self, result: StepResult) -> None:
        """Credit all players, and give the turn to the next one, or all of them the end.

        Raises SessionError: the observation does not say what `env.players` expects of it.
        """
        self._last = result
        for name, reward in self._rewards(result.observation).items():
            self._seats[name].reward += reward
        if result.done:
            self.end()
        else:
            self._seats[self._turn(result.observation)].give(result.observation, done=False)

    def end(self) -> None:
        """Give the end to all players that wait for their turn."""
        for seat in self._seats.values():
            seat.give(self._last.observation, done=True)

    def fail(self, error: SessionError) -> None:
        self._error = self._error or error
        for seat in self._seats.values():
            seat.fail(error)

    def _turn(self, observation: Observation) -> str:
        """Return the player who is to move. Raises SessionError."""
        field = self._players.turn
        found = observation.get(field)
        if not isinstance(found, str) or found not in self._seats:
            raise SessionError(
                f"env.players.turn={field}: the observation has {quoted(repr(found))} there, and "
                f"has to name the player who is to move, one of {', '.join(self._seats)} "
                f"(env.players.roles); its fields are {', '.join(observation)}"
            )
        return found

    def _rewards(self, observation: Observation) -> Mapping[str, float]:
        """Return what a step has earned its players. Raises SessionError."""
        field = self._players.rewards
        found = observation.get(field, "nothing")
        rewards = {} if found is None else found
        if not (
            isinstance(rewards, Mapping)
            and rewards.keys() <= self._seats.keys()
            and all(isinstance(each, int | float) for each in rewards.values())
            and all(abs(each) <= MAX_REWARD for each in rewards.values())  # not so of NaN
        ):
            raise SessionError(
                f"env.players.rewards={field}: the observation has {quoted(repr(found))} there, "
                "and has to have null or a mapping of players to numbers, of "
                f"{', '.join(self._seats)} (env.players.roles); its fields are "
                f"{', '.join(observation)}"
            )
        return rewards
