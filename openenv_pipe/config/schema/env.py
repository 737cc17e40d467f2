"""`env`: the environment, its server's command and limits, and its tasks."""

from typing import Annotated, Literal

from pydantic import Field

from openenv_pipe.config.rules.environment import POLICY
from openenv_pipe.config.schema.adapter import AdapterConfig
from openenv_pipe.config.schema.base import (
    Block,
    DottedPath,
    Number,
    NumTurns,
    PositiveCount,
    PositiveShare,
    Seconds,
    Variables,
)
from openenv_pipe.config.schema.tasks import TasksConfig


class LeagueConfig(Block):
    """Earlier versions of the policy that play against it in a share of the training games."""

    every: PositiveCount = Field(description="steps between two policies that join the league")
    size: PositiveCount = Field(
        description="number of members, the newest; the trained weights of each stay in memory"
    )
    share: PositiveShare = Field(
        description="fraction of a step's tasks in which a member plays all players but one, and "
        "that one is trained; the member is drawn for the step"
    )


class PlayersConfig(Block):
    """A game of several players, who move one at a time."""

    roles: dict[Annotated[str, Field(pattern=r"^[\w-]+$", examples=["x"])], str] = Field(
        min_length=2,
        description="who plays each player of the game; policy: the model, which is trained on it; "
        "untrained: the model, which is not; otherwise a name of env.baselines",
    )
    turn: str = Field(description="the field of the observation that names who is to move")
    rewards: str = Field(
        description="the field with a mapping of players to what the step earned them, or "
        "null; the rewards of the steps themselves are not used"
    )
    league: LeagueConfig | None = Field(
        description="earlier versions of the policy as opponents in training; null: none"
    )

    @property
    def trained(self) -> list[str]:
        """The players whose episodes are trained on."""
        return [player for player, role in self.roles.items() if role == POLICY]


class EnvConfig(Block):
    """An environment and the limits of its episodes (conf/env/base.yaml)."""

    name: str = Field(description="the environment's name, for messages and file names")
    package: str | None = Field(
        description="the OpenEnv package: a folder, or a bare name to look for in envs/; null: none"
    )
    python: str | None = Field(
        description="interpreter for the package's server; null: the one that runs this program"
    )
    command: list[str] | None = Field(
        description="starts the server instead of the package's own start; may contain {host}, "
        "{port} and, with host=process, {package}: the package's folder"
    )
    variables: Variables = Field(
        description="environment variables of the server; null: the value that this process has; "
        "with host=process, {package} is the package's folder, and {folder} the current one"
    )
    reset_timeout_s: Seconds = Field(description="time limit of a reset")
    step_timeout_s: Seconds = Field(description="time limit of a step")
    step_exception: Literal["failed", "unusable"] = Field(
        description="how a step that raises on the server counts; failed: the episode ends and is "
        "not trained on; unusable: as a mistake of the model, which is told and loses a turn"
    )
    max_message_mb: PositiveCount = Field(description="size limit of one message of the server")
    max_turns: NumTurns = Field(description="replies per episode; then the episode ends")
    max_reply_tokens: PositiveCount = Field(
        description="tokens per reply; longer replies are cut off"
    )
    max_episode_tokens: PositiveCount = Field(
        description="tokens per episode, prompts included, and of each branch of an episode that "
        "branches; the episode ends before a turn that might not fit"
    )
    max_observation_tokens: PositiveCount | None = Field(
        description="tokens of one message of the environment; of a longer one, the beginning and "
        "the end are kept, and a note of what was left out; null: no limit"
    )
    success_reward: Number = Field(
        description="an episode is a success if the environment's rewards sum to at least this"
    )
    metrics: dict[Annotated[str, Field(pattern=r"^[\w.-]+$", examples=["score"])], str] = Field(
        description="numbers of the observation that become training metrics env/NAME: by NAME, "
        "the path of the field, such as metadata.score; the scores of rubrics need no entry"
    )
    baselines: dict[str, DottedPath] = Field(
        description="scripted policies to evaluate beside the model, by name: expert, random, ..."
    )
    players: PlayersConfig | None = Field(
        description="players of a multi-player game, who move in turn; null: the model alone acts"
    )
    adapter: AdapterConfig
    tasks: TasksConfig

    @property
    def league(self) -> LeagueConfig | None:
        """The league of a game's players; None if there is no league, or no game."""
        return self.players.league if self.players is not None else None

    @property
    def min_reply_tokens(self) -> int:
        """The tokens that must be left for a reply to be sampled: one, and its end if it may have
        one (`Turn.is_cut_off`)."""
        return min(2, self.max_reply_tokens)
