"""The data classes that flow through the pipeline, each with one owner.

Shape letters: L tokens of one sample, N of them that are trained on.

    Task -> Episode(turns: Turn(steps: Step...)...) -> Group -> Sample -> Batch
    `------------ the environment's side -------------'     `- the trainer's -'

A worked example, Wordle with the tiny tokenizer and two turns:

    turns[0].prompt_ids      <|user|> W o r d l e <|assistant|>
    turns[0].completion_ids  c r a n e <|end|>
    turns[1].prompt_ids      <|user|> . g . . y <|assistant|>     only what is new
    turns[1].completion_ids  s h e e t <|end|>

The sample of that episode is the four lists joined; its loss mask is True on completions only.

The turns of an episode are a graph: a turn continues its `parent` if the parent's whole context and
completion are a prefix of the turn's prompt, token for token, and otherwise begins a root with its
whole prompt. A branch is a path from a root to a turn that no other continues.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Observation = Mapping[str, Any]
Action = Mapping[str, Any]
Message = Mapping[str, Any]  # "role", "content", perhaps "name", "images", "calls"
IMAGE_IDS = 2**52  # token ids from here on are those of images (`Image.token_id`)
IMAGE_DIGITS = 13  # hexadecimal, of a digest: token ids stay below 2**53, which JSON keeps exact
Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
Images = Mapping[int, "Image"]  # by their token ids
NO_IMAGES: Images = MappingProxyType({})
# A note of an episode in which it happened, which `episodes/cut_by_request` counts.
CUT_BY_REQUEST = "a reply was cut off by the max_tokens of its own request, below the run's limits"
PREVIOUS = -1  # as a turn's parent: the turn before it in the episode, if there is one


class Image(dict[str, Any]):
    """An image of an observation: its file's path in the run folder, and its size in pixels.

    As JSON it is `{"image": "images/DIGEST_OF_PIXELS.png", "width": ..., "height": ...}`.
    """

    __slots__ = ("_source",)

    def __init__(
        self, name: str, width: int, height: int, source: bytes | Callable[[], bytes]
    ) -> None:
        """source: the content of the PNG file, or what reads it."""
        super().__init__(image=f"images/{name}.png", width=width, height=height)
        self._source = source

    @property
    def token_id(self) -> int:
        """The id in place of each placeholder token of the image, in prompts of models that see it.

        It is above every vocabulary. It comes from the digest, so equal images have equal ids.
        """
        return IMAGE_IDS + int(self["image"].removeprefix("images/")[:IMAGE_DIGITS], 16)

    @property
    def png(self) -> bytes:
        """The content of the PNG file. Raises RunFolderError if it cannot be read."""
        return self._source if isinstance(self._source, bytes) else self._source()


class Status(StrEnum):
    """Why an episode ended."""

    DONE = "done"  # the environment reported the end
    ANSWERED = "answered"  # a reply had no action, and the adapter accepts that as the answer
    TURN_LIMIT = "turn_limit"  # env.max_turns replies were given
    TOKEN_LIMIT = "token_limit"  # the next turn would not fit into env.max_episode_tokens
    ERROR = "error"  # a session failed: the episode is recorded, but never trained on
    # Of programs (agent=program):
    TIME_LIMIT = "time_limit"  # it worked for agent.timeout_s, and was stopped
    OUTPUT_LIMIT = "output_limit"  # it wrote agent.max_output_mb, and was stopped
    NO_CALLS = "no_calls"  # it ended without an answered call to the model
    PROGRAM_FAILED = "program_failed"  # it ended with an exit code other than 0
    PROGRAM_KILLED = "program_killed"  # a signal ended it
    NO_REWARD = "no_reward"  # the verifier of its Harbor task gave no reward
    # Of clients (agent=client):
    CLIENT_FAILED = "client_failed"  # it reported a failure, or never called the model
    CLIENT_LOST = "client_lost"  # it left before it reported the end
    CLIENT_LATE = "client_late"  # agent.group_timeout_s of the group ran out

    @property
    def is_failure(self) -> bool:
        """True for an episode that must not count in its group."""
        return self is Status.ERROR or self.startswith(("client_", "program_", "no_"))

    @property
    def is_of_client(self) -> bool:
        """True for an episode that a client did not play to its end."""
        return self.startswith("client_")

    @property
    def is_limit(self) -> bool:
        """True for an episode that a limit ended, not the environment."""
        return self.endswith("_limit")


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the model wrote its end-of-turn token
    LENGTH = "length"  # max_tokens were used up: the reply is truncated
    FILTERED = "content_filter"  # the provider of a hosted model withheld the reply, or its rest


class TurnRole(StrEnum):
    """What a turn is to the episode. Only turns of the agent are trained."""

    AGENT = "agent"
    RETRY = "retry"  # sampled and discarded: another turn in its place was continued
    AUXILIARY = "auxiliary"  # a call aside from the task without the agent's tools, as for a title
    CONTEXT = "context"  # a written reply that is shown, and not imitated


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One thing to do in an environment: what `reset` is called with."""

    id: str  # "train/17"
    split: str
    index: int
    seed: int  # the environment's seed, the same for every member of a group
    reset: Mapping[str, Any] = field(default_factory=dict)  # keywords besides the seed
    labels: Mapping[str, str] = field(default_factory=dict)  # {"topic": "algebra"}: not for reset
    env: str = ""  # the environment's name in `beside`; empty: the one of `env`


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """The first messages of a conversation, and the tools or action schema that the model uses."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()  # for the chat template to describe
    action_schema: Mapping[str, Any] = field(default_factory=dict)  # of a JSON reply; empty: text


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One action of the model's, and what the environment answered."""

    action: Action
    observation: Observation
    reward: float = 0.0  # the environment's own, null counted as 0

    @property
    def is_report(self) -> bool:
        """Whether a program or client reports here what it earned, and no environment answers."""
        return not self.action and self.observation.keys() == {"reported"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Reported or estimated numbers of tokens of a turn whose token ids are unknown."""

    num_prompt_tokens: int  # new in this turn
    num_completion_tokens: int


@dataclass(kw_only=True, slots=True)
class Turn:
    """One prompt, one completion, and the steps that the completion asked for, such as tool calls.

    A turn of an engine that takes messages has `messages` and `usage`; its lists of ids and
    logprobs are empty, and it cannot be trained on.
    """

    # What is new since the parent; for a root, the whole prompt.
    prompt_ids: list[int] = field(repr=False)
    # Exactly as sampled, the end token included if there was one.
    completion_ids: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)  # of completion_ids, at the sampling temperature
    finish: Finish
    policy_versions: list[int]  # those that sampled it, in order
    reply: str  # completion_ids as text, without the end token
    # The index of the turn that this one continues (`Episode.parents` resolves PREVIOUS), or None.
    parent: int | None = PREVIOUS
    role: TurnRole = TurnRole.AGENT
    steps: list[Step] = field(default_factory=list)  # empty: the reply was not sent
    unusable: str | None = None  # why the reply, or the rest of it, could not be used
    # The messages that were new to the model in this turn.
    messages: list[Message] = field(default_factory=list)
    usage: Usage | None = None  # None: the ids are known
    # Unix times in seconds, for traces: when the reply was asked for, when it came, and when each
    # step was answered. Empty for a turn that was read from a file, because files have no times.
    times_s: list[float] = field(default_factory=list, compare=False)

    @property
    def num_prompt_tokens(self) -> int:
        return self.usage.num_prompt_tokens if self.usage else len(self.prompt_ids)

    @property
    def num_completion_tokens(self) -> int:
        return self.usage.num_completion_tokens if self.usage else len(self.completion_ids)

    @property
    def is_cut_off(self) -> bool:
        """True if a limit ended the reply. A reply of a single token counts as whole."""
        return self.finish is Finish.LENGTH and self.num_completion_tokens > 1

    @property
    def observation(self) -> Observation:
        """What the last step returned; empty if there was none."""
        return self.steps[-1].observation if self.steps else {}

    @property
    def reward(self) -> float:
        """The sum of the steps' rewards."""
        return sum((step.reward for step in self.steps), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What a judge said of an episode, for one reward term."""

    explanation: str
    num_calls: int = 0  # a call about several episodes is counted at the first of them
    num_tokens: int = 0  # of prompts and answers, likewise
    cost: float = 0.0  # in the unit of the judge's prices
    # Of a term that shows several episodes in random orders, a value for each order:
    positions: list[float] = field(default_factory=list)  # in the prompt: 0.0 first, 1.0 last
    scores: list[float] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Episode:
    """One play of one task, from reset to its end."""

    task: Task
    member: int  # 0..G-1 in its group
    seed: int  # the sampling seed: differs for each member of a group
    first_observation: Observation = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    status: Status = Status.ERROR
    error: str | None = None
    reward: float = 0.0  # weighted sum of the reward terms
    whole_reward: float = 0.0  # the part of it that the episode gets as a whole
    turn_rewards: list[float] = field(default_factory=list)  # the part that each trained turn gets
    reward_terms: dict[str, float] = field(default_factory=dict)  # unweighted, for the log
    success: bool = False
    judgements: dict[str, Judgement] = field(default_factory=dict)  # by reward term
    unscored: str | None = None  # why there is no reward: a judge failed
    output: str = ""  # of a program: what it wrote to stdout and stderr, cut
    exit_code: int | None = None  # of a program that ended by itself; above 128: a signal ended it
    notes: list[str] = field(default_factory=list)  # what a program asked for and did not get
    duration_s: float = 0.0
    started_s: float | None = field(default=None, compare=False)  # Unix time; not stored in files
    others: list["Episode"] = field(default_factory=list)  # of its game, until grouped
    after_a_move: bool = field(default=False, compare=False)  # another player moved; not stored

    @property
    def observations(self) -> list[Observation]:
        """All observations so far, beginning with that of the reset."""
        steps = [step.observation for turn in self.turns for step in turn.steps]
        return [self.first_observation, *steps]

    @property
    def failed(self) -> bool:
        """True for an episode that must not count in its group."""
        return self.status.is_failure

    @property
    def timed_out(self) -> bool:
        """True for an episode that failed because its environment gave no answer in time."""
        return self.failed and (self.error or "").startswith("SessionTimeoutError:")

    @property
    def is_scored(self) -> bool:
        """True for an episode that counts in its group: it did not fail, and has a reward."""
        return not self.failed and self.unscored is None

    @property
    def truncated(self) -> bool:
        """True if a limit, not the environment, ended the episode or one of its replies."""
        return self.status.is_limit or any(turn.is_cut_off for turn in self.turns)

    @property
    def agent_turns(self) -> list[Turn]:
        """The turns that are trained: no retries, auxiliary calls and replies that are context."""
        return [turn for turn in self.turns if turn.role is TurnRole.AGENT]

    @property
    def parents(self) -> list[int | None]:
        """For each turn the index of the turn that it continues; None where it begins a root."""
        return [
            (index - 1 if index else None) if turn.parent == PREVIOUS else turn.parent
            for index, turn in enumerate(self.turns)
        ]

    @property
    def branches(self) -> list[list[int]]:
        """The indices of the turns on each path from a root to a turn that no other continues."""
        parents = self.parents
        continued = set(parents)
        return [path_to(index, parents) for index in range(len(parents)) if index not in continued]

    @property
    def num_tokens(self) -> int:
        """The tokens of all turns; what a turn shares with the one it continues counts once."""
        return sum(turn.num_prompt_tokens + turn.num_completion_tokens for turn in self.turns)

    @property
    def num_branch_tokens(self) -> int:
        """The tokens of the longest branch, which env.max_episode_tokens limits."""
        counts = [turn.num_prompt_tokens + turn.num_completion_tokens for turn in self.turns]
        return max((sum(counts[index] for index in path) for path in self.branches), default=0)

    @property
    def num_completion_tokens(self) -> int:
        return sum(turn.num_completion_tokens for turn in self.turns)

    @property
    def prompt_lengths(self) -> list[int]:
        """For each turn the tokens of its whole prompt, which begins with the turns before it."""
        counts = [turn.num_prompt_tokens + turn.num_completion_tokens for turn in self.turns]
        parents = self.parents
        return [
            sum(counts[each] for each in path_to(index, parents)) - turn.num_completion_tokens
            for index, turn in enumerate(self.turns)
        ]


def path_to(index: int, parents: Sequence[int | None]) -> list[int]:
    """Return the indices of the turns from the root to a turn. parents: as `Episode.parents`."""
    path, place = [index], parents[index]
    while place is not None:
        path.append(place)
        place = parents[place]
    return path[::-1]


@dataclass(kw_only=True, slots=True)
class Group:
    """G episodes of one task. Members are known by the group's id, not by the prompt's text."""

    id: str
    task: Task
    episodes: list[Episode]
    seed: int = 0  # for requests that sample for several members; episode files do not store it

    @property
    def scored(self) -> list[Episode]:
        """The episodes that count: those that did not fail and have a reward."""
        return [episode for episode in self.episodes if episode.is_scored]


@dataclass(kw_only=True, slots=True)
class Sample:
    """One path through an episode's turns as the trainer sees it. All lists have length L."""

    group: str
    member: int  # of the group: with it, this identifies the episode
    num_episode_tokens: int  # trained tokens of all samples of the episode
    token_ids: list[int]
    loss_mask: list[bool]  # True where the model chose the token, and no earlier sample has it
    logprobs: list[float]  # the sampler's; 0.0 where the mask is False
    advantages: list[float]  # 0.0 where the mask is False
    # True where the environment answered a reply with the token, and no earlier sample has it.
    environment_mask: list[bool] = field(default_factory=list)
    # Indices of the turns whose completions are the tokens with a True mask, in their order.
    trained_turns: list[int] = field(default_factory=list)
    images: Images = field(default_factory=dict)  # those in token_ids
    env: str = ""  # that of the task
    hinted: "Sample | None" = None  # the same replies after a prompt with a hint
    reference_logprobs: list[float] | None = None  # those of a teacher on a server


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedTokens:
    """What the learner has computed for a sample's N trained tokens, in their order."""

    entropy: "np.ndarray"  # [N] float16
    # [N] float16: the trainer's logprob when the step began, minus the sampler's; NaN: not computed
    mismatch: "np.ndarray"
