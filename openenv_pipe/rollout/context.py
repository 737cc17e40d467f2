"""What episodes are played with, and the interface of what plays them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from pydantic import JsonValue

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.engines.base import Engine
from openenv_pipe.environments.tasks import Splits
from openenv_pipe.environments.tasks.splits import KnownSets
from openenv_pipe.models.chat.reply_writer import ReplyWriter
from openenv_pipe.models.replies.reader import ReplyReader
from openenv_pipe.types import Episode, Group, Message, Task, Tool

# Labels of a task in a game of several players: whose episode it is, and the step of the earlier
# policy that plays against it, if one does.
PLAYER, OPPONENT = "player", "opponent"


class Chat(Protocol):
    """The methods of a chat format that an episode needs if its engine takes token ids."""

    history: Literal["append", "rerender"]
    reply_reader: ReplyReader

    @property
    def writer(self) -> ReplyWriter: ...
    @property
    def sees_images(self) -> bool: ...
    def first_ids(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]: ...
    def following_ids(self, messages: Sequence[Message], *, end: int | None) -> list[int]: ...
    def rendered_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        replies: Mapping[int, Sequence[int] | None] = ...,
    ) -> list[int]: ...
    def without_markup(self, messages: Iterable[Message]) -> list[Message]: ...
    def reply_message(
        self, reply: str, tools: Sequence[Tool] = (), *, is_sampled: bool = True
    ) -> Message: ...
    def reply_text(self, completion_ids: Sequence[int]) -> str: ...
    def reply_ids(self, reply: str) -> list[int]: ...
    def cut(self, text: str, max_tokens: int) -> str: ...


class PlayContext(Protocol):
    """What all episodes of a rollout batch share."""

    @property
    def env(self) -> EnvConfig: ...
    @property
    def chat(self) -> Chat | None: ...
    @property
    def engine(self) -> Engine: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSpec:
    task: Task
    seed: int  # the sampling seed: differs for each member of a group
    temperature: float
    number: int  # identifies the episode to the engine
    member: int = 0  # 0..G-1 in its group
    group: str = ""  # the group's id
    group_size: int = 1  # G
    group_seed: int = 0  # for requests that sample for several members
    roles: Mapping[str, Engine | str] = field(default_factory=dict)  # see `RolloutContext`


class EpisodeRunner(Protocol):
    """Plays episodes, each from its reset to its end.

    They are played by the loop of this process (`rollout.episode`), by workers on other machines,
    or by programs and clients that call the model (the block `agent`).
    """

    @property
    def capacity(self) -> int:
        """How many episodes it plays at once."""

    @property
    def num_deaths(self) -> int:
        """How many environment servers have died so far."""

    def facts(self) -> dict[str, JsonValue]:
        """Return facts about the environment servers for the run's record; see `Host.facts`."""

    async def play(self, context: PlayContext, spec: EpisodeSpec) -> Episode:
        """Play an episode. A session's failure ends it with the status ERROR.

        Raises EngineError, HostError, ConfigError: these end the run.
        """


class EpisodeLoop(EpisodeRunner, Protocol):
    """The pipeline's own loop with environment servers of its own, here or on other machines."""

    async def start(self) -> None:
        """Start the servers. Raises HostError and ConfigError."""

    async def prepare(self, chat: Chat | None) -> None:
        """Set the chat format that all episodes share, before the first of them."""

    async def open_splits(self, known: KnownSets) -> Splits:
        """Complete the task sets with those that the servers list. Raises ConfigError."""

    async def close(self) -> None:
        """Stop the servers, in bounded time."""


class Scorer(Protocol):
    """Computes the rewards of episodes that have been played."""

    async def score(self, group: Group) -> None:
        """Set the rewards of a group's episodes, their terms, and whether they succeeded."""

    def accept(self, groups: Sequence[Group]) -> None:
        """Accept the scores of a rollout batch. Raises JudgeError if too many are missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutContext:
    """What plays the episodes, their tasks, the engine, the chat format and the scorer.

    It is the `PlayContext` of its episodes.
    """

    env: EnvConfig
    loop: EpisodeRunner  # the pipeline's own loop, in this process or on workers
    splits: Splits
    chat: Chat | None  # None: the engine takes messages
    engine: Engine
    scorer: Scorer
    agents: EpisodeRunner | None = None  # programs or clients that play in place of the loop
    # Who plays each player of a game: POLICY, UNTRAINED or an engine of its own; empty: no game.
    roles: Mapping[str, Engine | str] = field(default_factory=dict)
    # With several environments: the context of each, by the name that its tasks have.
    parts: Mapping[str, "RolloutContext"] = field(default_factory=dict)

    @property
    def environments(self) -> Mapping[str, "RolloutContext"]:
        """The contexts by environment, as `RunConfig.environments` names them."""
        return self.parts or {"": self}

    def of(self, task: Task) -> "RolloutContext":
        """Return the context of a task's environment, with this context's engine."""
        part = self.parts.get(task.env)
        return self if part is None else replace(part, engine=self.engine)

    async def score(self, group: Group) -> None:
        """Score a group by the rewards of its environment; see `Scorer.score`."""
        await self.of(group.task).scorer.score(group)

    def facts(self) -> dict[str, JsonValue]:
        """Return the facts about the servers of the first environment, and those of the others."""
        facts = {env: part.runner.facts() for env, part in self.environments.items()}
        first = facts.pop("")
        return {**first, "beside": {**facts}} if facts else first

    @property
    def runner(self) -> EpisodeRunner:
        """What plays the episodes."""
        return self.agents or self.loop

    def with_engine(self, engine: Engine) -> "RolloutContext":
        """Return the same context with another engine, which the loop plays, not an agent."""
        return replace(self, engine=engine, agents=None)
