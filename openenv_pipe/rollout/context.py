"""The rollout context: one frozen object with everything that playing an episode needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.engines.base import Engine
from openenv_pipe.environments.adapters.base import Adapter
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.tasks import Splits
from openenv_pipe.models.reply_reader import ReplyReader
from openenv_pipe.types import Episode, Group, Message, Tool

if TYPE_CHECKING:
    from openenv_pipe.rollout.episode import Player


class Chat(Protocol):
    """The methods of a chat format that an episode needs if its engine takes token ids."""

    history: Literal["append", "rerender"]
    reply_reader: ReplyReader

    @property
    def sees_pictures(self) -> bool: ...
    def first_ids(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]: ...
    def following_ids(self, messages: Sequence[Message], *, end: int | None) -> list[int]: ...
    def rendered_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        replies: Mapping[int, Sequence[int] | None] = ...,
    ) -> list[int]: ...
    def without_markup(self, messages: Iterable[Message]) -> list[Message]: ...
    def reply_message(self, reply: str, *, is_sampled: bool = True) -> Message: ...
    def reply_text(self, completion_ids: Sequence[int]) -> str: ...
    def reply_ids(self, reply: str) -> list[int]: ...
    def cut(self, text: str, max_tokens: int) -> str: ...


class PlayContext(Protocol):
    """What playing one episode needs."""

    @property
    def env(self) -> EnvConfig: ...
    @property
    def host(self) -> Host: ...
    @property
    def adapter(self) -> Adapter: ...
    @property
    def chat(self) -> Chat | None: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def reads_messages(self) -> bool:
        """Whether episodes have to keep their messages, because a reward term reads them."""
        ...


class Players(Protocol):
    """Makes the players of episodes, in the place of `rollout.episode.Player`.

    They are programs (`rollout.agents.player`), or players on other machines (`rollout.cluster`).
    """

    def player(
        self,
        context: "RolloutContext",
        group: Group,
        episode: Episode,
        *,
        number: int,
        temperature: float,
    ) -> "Player": ...


class Scorer(Protocol):
    """Computes the rewards of episodes that have been played."""

    @property
    def reads_messages(self) -> bool:
        """Whether episodes have to keep their messages."""
        ...

    async def score(self, group: Group) -> None:
        """Set the rewards of a group's episodes, their terms, and whether they succeeded."""
        ...

    def accept(self, groups: Sequence[Group]) -> None:
        """Accept the scores of a collection. Raises JudgeError if too many are missing."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutContext:
    """The environment's servers, adapter and tasks, the engine, the chat format and the scorer.

    It is the `PlayContext` of its episodes.
    """

    env: EnvConfig
    host: Host
    adapter: Adapter
    splits: Splits
    chat: Chat | None  # None: the engine takes messages
    engine: Engine
    scorer: Scorer
    programs: Players | None = None  # play in the place of the pipeline's loop
    workers: Players | None = None  # play on other machines

    @property
    def reads_messages(self) -> bool:
        return self.scorer.reads_messages

    def with_engine(self, engine: Engine) -> "RolloutContext":
        """Return the same context with another engine, such as a scripted player."""
        return replace(self, engine=engine, programs=None)
