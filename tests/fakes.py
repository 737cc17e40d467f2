"""Fakes for the tests of the training core: an environment and its host, small models, samples.

Nothing here starts a process or opens a connection. Fakes keep the real protocols, so that what
is between them (episode loop, engine, learner) is the real thing.
"""

import asyncio
import copy
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from openenv_pipe.algorithms.losses.normalization import Uncomputed
from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import RunConfig, TinyModelConfig, TrainerConfig, VllmEngineConfig
from openenv_pipe.engines import Completion, Engine, TokenRequest
from openenv_pipe.engines.base import StaticEngine
from openenv_pipe.engines.local import LocalEngine
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.environments.tasks import RangeTasks, Splits
from openenv_pipe.learner.checkpoint import load_progress, load_weights, save_progress, save_weights
from openenv_pipe.learner.learner import NOTHING, Learner
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.load import load_policy
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.tiny import CHAT_TEMPLATE
from openenv_pipe.rewards import Scorer
from openenv_pipe.rollout import RolloutContext, play_groups
from openenv_pipe.rollout.episode import LocalRunner
from openenv_pipe.types import Episode, Finish, Group, Sample, Status, Step, Task, Turn

# the tests' models are too small for more threads, and other processes use the machine
torch.set_num_threads(1)

CPU = torch.device("cpu")
SPLITS = ("train", "eval")
TASK = Task(id="train/0", split="train", index=0, seed=0)
# Of the tiny model's replies, the first character is a thought.
DROPS_THOUGHTS = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content[1:] if message.role == 'assistant' and not loop.last else"
    " message.content }}",
)


# --- configuration ------------------------------------------------------------------------------


@cache
def _shipped() -> dict[str, Any]:
    plain = ("type=adamw", "schedule=constant", "final_lr_share=null")
    optimizer = [f"trainer.optimizer.{setting}" for setting in plain]
    return compose(["conf=echo", "trainer.advantage.discount=1.0", *optimizer]).config.model_dump()


# Of an adapter; `None` stands for the observation as it is.
TEMPLATES: dict[str, Any] = {
    "system": None,
    "examples": [],
    "first": None,
    "following": None,
    "unusable": "no: {{ why }}",
}


def run_config(changes: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the echo experiment for the fake environment, with changes: {"trainer.optimizer.lr":
    1.0}."""
    values = copy.deepcopy(_shipped())
    values["env"] |= {"name": "fake", "max_turns": 4, "max_reply_tokens": 12}
    values["env"]["max_episode_tokens"] = 120
    values["env"]["adapter"] = {
        "type": "text",
        **TEMPLATES,
        "first": "{{ text }}",
        "following": "{{ text }}",
        "unusable": "? {{ why }}",
        "pattern": r"(?s)^(?P<text>.*)$",
    }
    for key, value in (changes or {}).items():
        *path, name = key.split(".")
        block = values
        for part in path:
            block = block[part]
        assert name in block, key
        block[name] = value
    return RunConfig.model_validate(values)


def kl_term(coef: float, **changes: Any) -> dict[str, Any]:
    """Return the keys of a KL term to the policy as it was at the start."""
    keys = {"reference": None, "estimator": "k3", "importance_weights": False}
    return {"coef": coef, **keys, "refresh_every": None, "hint": None, **changes}


def trainer_config(changes: Mapping[str, Any] | None = None) -> TrainerConfig:
    """Return the trainer of `run_config`, with changes: {"optimizer.lr": 1.0}."""
    return run_config({f"trainer.{key}": each for key, each in (changes or {}).items()}).trainer


# --- environment and host -----------------------------------------------------------------------

Play = Callable[[int, int, Mapping[str, Any]], StepResult]


def play(seed: int, number: int, action: Mapping[str, Any]) -> StepResult:
    """Return step `number` (0: the reset) of a task. Its seed decides its length, two to four
    turns."""
    text = f"{seed}" if number == 0 else f"{number}: {'x' * (seed % 3)}"
    reward = sum(map(ord, action.get("text", ""))) % 11 / 10
    return StepResult({"text": text}, reward, done=number == 2 + seed % 3)


class FakeSession:
    """A session with one environment. `play` returns or raises the result of each reset and
    step."""

    def __init__(self, host: "FakeHost") -> None:
        self._host = host
        self._seed = 0
        self._number = 0

    async def reset(self, keywords: Mapping[str, Any], timeout_s: float) -> StepResult:
        self._seed, self._number = keywords["seed"], 0
        return await self._answer({})

    async def step(self, action: Mapping[str, Any], timeout_s: float) -> StepResult:
        self._number += 1
        return await self._answer(action)

    async def _answer(self, action: Mapping[str, Any]) -> StepResult:
        await self._host.delay()
        return self._host.play(self._seed, self._number, action)


class FakeHost:
    """Lends fake sessions. With `order`, environments answer in an order drawn from it."""

    def __init__(
        self, play: Play = play, *, capacity: int = 64, order: random.Random | None = None
    ) -> None:
        self.play = play
        self.capacity = capacity
        self.urls: Sequence[str] = ()
        self.num_deaths = 0
        self._order = order
        self._free = asyncio.Semaphore(capacity)

    async def start(self) -> None:
        """Nothing to start."""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[FakeSession]:
        async with self._free:
            yield FakeSession(self)

    async def close(self) -> None:
        """Nothing to stop."""

    async def delay(self) -> None:
        for _ in range(self._order.randrange(40) if self._order else 1):
            await asyncio.sleep(0)


# --- models and engines -------------------------------------------------------------------------


def tiny_model(
    *, seed: int = 0, lora_rank: int = 0, dropout: float = 0.0, autocast: str = "float32"
) -> TinyModelConfig:
    """A model of about ten thousand weights, initialised widely so that its distributions
    differ."""
    values = _shipped()["model"] | {
        "seed": seed,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_size": 16,
        "init_std": 0.15,
        "dtype": "float32",
        "autocast": autocast,
        "lora": {
            "rank": lora_rank,
            "alpha": 8.0,
            "dropout": dropout,
            "target_modules": "all-linear",
        },
    }
    return TinyModelConfig.model_validate(values)


def tiny_policy(
    *, seed: int = 0, lora_rank: int = 0, ends: bool = False, autocast: str = "float32"
) -> Policy:
    """A policy with random weights. With `ends`, about every tenth token ends the turn."""
    config = tiny_model(seed=seed, lora_rank=lora_rank, autocast=autocast)
    policy = load_policy(config, seed=seed, device=CPU)
    if ends:
        # tied embeddings: this changes the head as well
        embeddings = policy.model.get_input_embeddings().weight.data
        embeddings[:, 0] = 1.0
        embeddings[policy.chat.ends.usual, 0] = 4.5
    return policy


class ChatOnly:
    """A policy that has only a chat template, for `collect` with an engine of its own."""

    def __init__(self, chat: ChatFormat | None) -> None:
        self.chat = chat


class InlineExecutor(Executor):
    """Runs each function at once, in the caller's thread."""

    def submit(self, function: Callable, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def local_engine(
    policy: Policy, *, max_episodes: int = 64, frozen: Mapping[str, Policy] | None = None
) -> LocalEngine:
    return LocalEngine(policy, max_episodes=max_episodes, executor=InlineExecutor(), frozen=frozen)


class RecordingEngine:
    """Wraps an engine and keeps the requests and completions of each episode."""

    def __init__(self, engine: Engine) -> None:
        self.capabilities, self.max_episodes = engine.capabilities, engine.max_episodes
        self.begin_rollouts, self.end_episode = engine.begin_rollouts, engine.end_episode
        self.publish = engine.publish
        self.metrics, self.facts = engine.metrics, engine.facts
        self.calls: dict[int, list[tuple[TokenRequest, Completion]]] = {}
        self._engine = engine

    async def generate(self, request: TokenRequest) -> Completion:
        completion = await self._engine.generate(request)
        self.calls.setdefault(request.episode, []).append((request, completion))
        return completion


class LengthsEngine(StaticEngine):
    """Returns random ids in replies of random lengths, some of them without an end token."""

    capabilities = VllmEngineConfig.capabilities
    max_episodes = 64

    def __init__(self, end_id: int, seed: int) -> None:
        self._end_id = end_id
        self._draw = random.Random(seed)

    async def generate(self, request: TokenRequest) -> Completion:
        wanted = self._draw.randrange(1, 30)
        token_ids = [self._draw.randrange(10, 200) for _ in range(wanted - 1)] + [self._end_id]
        token_ids = token_ids[: request.max_tokens]
        return Completion(
            token_ids=token_ids,
            logprobs=[-1.0] * len(token_ids),
            finish=Finish.STOP if token_ids[-1] == self._end_id else Finish.LENGTH,
            policy_versions=[0],
        )


# --- rollouts -----------------------------------------------------------------------------------


def rollout_context(
    config: RunConfig, host: FakeHost, *, chat: ChatFormat | None, engine: Engine
) -> RolloutContext:
    """Return what episodes share, for a fake host."""
    return RolloutContext(
        env=config.env,
        loop=LocalRunner(host, build_adapter(config.env.adapter)),
        splits=Splits(**{each: RangeTasks(each, config.env.tasks.train) for each in SPLITS}),
        chat=chat,
        engine=engine,
        scorer=Scorer(config.reward, config.env.success_reward),
    )


async def collect(
    policy: Policy,
    *,
    engine: Engine | None = None,
    host: FakeHost | None = None,
    config: RunConfig | None = None,
    num_tasks: int = 4,
    group_size: int = 2,
    temperature: float = 1.0,
    seed: int = 0,
    label: str = "step 1",
) -> list[Group]:
    """Collect as the pipeline does; an episode's reward is the sum of the environment's."""
    config = config or run_config()
    context = rollout_context(
        config, host or FakeHost(), chat=policy.chat, engine=engine or local_engine(policy)
    )
    tasks = [context.splits.train[index] for index in range(num_tasks)]
    groups = await play_groups(
        context, tasks, group_size=group_size, temperature=temperature, seed=seed, label=label
    )
    for episode in all_episodes(groups):
        episode.reward = episode.whole_reward = sum(turn.reward for turn in episode.turns)
    return groups


def all_episodes(groups: Sequence[Group]) -> list[Episode]:
    return [episode for group in groups for episode in group.episodes]


def sampled(groups: Sequence[Group]) -> list[tuple[list[int], list[float]]]:
    """Return the ids and logprobs of every completion, in order."""
    turns = [turn for episode in all_episodes(groups) for turn in episode.turns]
    return [(turn.completion_ids, turn.logprobs) for turn in turns]


def plain_sample(episode: Episode) -> Sample:
    """Return the episode's sample with an advantage of 1 everywhere."""
    (sample,) = episode_samples(episode.task.id, episode, [1.0] * len(episode.turns))
    return sample


# --- episodes, samples and gradients made up ----------------------------------------------------


def made_up_turn(
    prompt_ids: list[int], completion_ids: list[int], *, reward: float = 0.0, **fields: Any
) -> Turn:
    values = {
        "steps": [Step(action={}, observation={}, reward=reward)],
        "logprobs": [-1.0] * len(completion_ids),
        "finish": Finish.STOP,
        "policy_versions": [0],
        "reply": "",
    }
    return Turn(prompt_ids=prompt_ids, completion_ids=completion_ids, **(values | fields))


def made_up_episode(
    reward: float = 0.0,
    *,
    member: int = 0,
    turns: Sequence[Turn] = (),
    status: Status = Status.DONE,
    turn_rewards: Sequence[float] = (),
) -> Episode:
    """Return an episode; `reward` minus the sum of `turn_rewards` is its whole-episode reward."""
    return Episode(
        task=TASK,
        member=member,
        seed=member,
        turns=list(turns) or [made_up_turn([5], [6])],
        status=status,
        reward=reward,
        whole_reward=reward - sum(turn_rewards),
        turn_rewards=list(turn_rewards),
    )


def made_up_group(rewards: Sequence[float], *, failed: Sequence[int] = (), id: str = "0") -> Group:
    """Return a group of one-turn episodes with these rewards, of which the members in `failed`
    failed."""
    episodes = [
        made_up_episode(
            reward, member=member, status=Status.ERROR if member in failed else Status.DONE
        )
        for member, reward in enumerate(rewards)
    ]
    return Group(id=id, task=TASK, episodes=episodes)


def random_sample(draw: random.Random, shape: Sequence[tuple[int, int]]) -> Sample:
    """A sample whose turns have (prompt, completion) token counts as in `shape`."""

    def ids(count: int) -> list[int]:
        return [draw.randrange(5, 250) for _ in range(count)]

    turns = [
        made_up_turn(
            ids(given), ids(chosen), logprobs=[-draw.uniform(4.0, 7.0) for _ in range(chosen)]
        )
        for given, chosen in shape
    ]
    advantages = [draw.uniform(-2.0, 2.0) for _ in turns]
    member = hash(tuple(turns[0].logprobs))  # of each sample another, so that each is an episode
    episode = made_up_episode(turns=turns, member=member)
    (sample,) = episode_samples("group", episode, advantages)
    return sample


def random_samples(seed: int, count: int = 6, *, max_tokens: int = 6) -> list[Sample]:
    """Samples of one to three turns and different lengths."""
    draw = random.Random(seed)

    def length() -> int:
        return draw.randrange(1, max_tokens + 1)

    return [
        random_sample(draw, [(length(), length()) for _ in range(draw.randrange(1, 4))])
        for _ in range(count)
    ]


def alike_samples(seed: int, count: int = 6, *, max_tokens: int = 12) -> list[Sample]:
    """Samples of one or two turns that share their first tokens, or all tokens, with others."""
    draw = random.Random(seed)
    roots = random_samples(seed, count=2, max_tokens=max_tokens)
    samples = []
    for number in range(count):
        root = roots[number % 2]
        whole = len(root.token_ids) if number < 2 else draw.randrange(1, len(root.token_ids) + 1)
        tail = random_sample(draw, [(draw.randrange(1, 4), draw.randrange(1, max_tokens))])
        tail.advantages = [draw.uniform(-2.0, 2.0) * chosen for chosen in tail.loss_mask]
        samples.append(
            Sample(
                group=root.group,
                member=number,
                num_episode_tokens=sum(root.loss_mask[:whole] + tail.loss_mask),
                token_ids=root.token_ids[:whole] + tail.token_ids,
                loss_mask=root.loss_mask[:whole] + tail.loss_mask,
                logprobs=root.logprobs[:whole] + tail.logprobs,
                advantages=[draw.uniform(-2.0, 2.0) * chosen for chosen in root.loss_mask[:whole]]
                + tail.advantages,
            )
        )
    return [*samples, dataclasses.replace(samples[-1], member=count)]


def resume_from(first: Learner, second: Learner, folder: Path) -> None:
    """Load the first learner's checkpoint into the second learner."""
    save_weights(folder, first.policy, steps=2, warm_start_steps=0)
    (folder / "resume").mkdir()
    save_progress(folder / "resume", first.policy, first.optimizer)
    load_weights(folder, second.policy)
    load_progress(folder / "resume", second.policy, second.optimizer)


def trained_tensors(policy: Policy) -> list[torch.nn.Parameter]:
    return [parameter for parameter in policy.model.parameters() if parameter.requires_grad]


class GradientKeeper:
    """Replaces the learner's optimizer: keeps the gradients of each update and changes no
    weight."""

    lr = 0.0

    def __init__(self, policy: Policy) -> None:
        self.updates: list[list[torch.Tensor]] = []
        self._parameters = trained_tensors(policy)

    def step(self) -> float:
        self.updates.append([parameter.grad.clone() for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None
        return 0.0


# How far an update of several processes may differ from that of one, and settings (below
# `trainer`) that they are compared with.
LOSS_BOUND, GRADIENT_BOUND = 1e-5, 1e-4
PLAIN = {"tokens_per_batch": 24, "optimizer.max_grad_norm": 1e9, "optimizer.lr": 1e-3}
WITH_ALL = {  # a small eps would let Adam amplify rounding where a gradient is zero
    "tokens_per_batch": 24,
    "updates_per_step": 2,
    "loss.kl.coef": 0.1,
    "loss.entropy_coef": 0.01,
    "loss.correction.type": "truncate",
    "optimizer.max_grad_norm": 0.5,
    "optimizer.lr": 1e-3,
    "optimizer.eps": 1e-3,
}


def numbers_of(metrics: dict[str, object]) -> dict[str, object]:
    """Return the metrics of an update that do not depend on the clock or the number of processes.

    A group that is split over two ranks shares fewer prefixes, so more tokens are computed.
    """
    others = ("stage", "tokens/computed")
    return {k: v for k, v in metrics.items() if not k.startswith("time/") and k not in others}


def loss_and_gradients(
    policy: Policy,
    samples: Sequence[Sample],
    changes: Mapping[str, Any] | None = None,
    uncomputed: Uncomputed = NOTHING,
) -> tuple[float, list[torch.Tensor]]:
    """Return the loss and all gradients of one update, without changing the weights."""
    learner = Learner(policy, trainer_config(changes), max_episode_tokens=120, seed=0)
    learner.optimizer = keeper = GradientKeeper(policy)
    metrics = learner.update(samples, 1, uncomputed)
    (gradients,) = keeper.updates
    return metrics["loss/total"], gradients


def assert_same_update(
    first: tuple[float, list[torch.Tensor]], second: tuple[float, list[torch.Tensor]]
) -> None:
    """Assert losses equal to 1e-5, and gradients to 1e-4 of each tensor's largest entry."""
    assert abs(first[0] - second[0]) <= 1e-5 * max(1.0, abs(first[0]))
    for one, other in zip(first[1], second[1], strict=True):
        assert (one - other).abs().max() <= 1e-4 * one.abs().max() + 1e-8
