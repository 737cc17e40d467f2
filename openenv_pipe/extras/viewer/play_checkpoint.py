"""Play a checkpoint in its environment for the viewer, with a person who decides who replies.

The episode is played as in training, by the same `Player`. Between it and the engine stands
`SteeredEngine`, which asks the person at each turn. Nothing is written into the run folder.
"""

import asyncio
import logging
import random
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from openenv_pipe.config.schema import LocalClusterConfig, NoJudgeConfig, RunConfig
from openenv_pipe.engines.base import Completion, Engine, StaticEngine, TextReply, TokenRequest
from openenv_pipe.engines.scripted import Replies, replies_of
from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.extras.viewer.web.play import PlayRequest, PlayState, PlayStatus
from openenv_pipe.registry import block_types
from openenv_pipe.rollout.context import Chat, EpisodeSpec, RolloutContext
from openenv_pipe.rollout.conversation import written_completion
from openenv_pipe.rollout.episode import LocalRunner, Player
from openenv_pipe.runs.find import PLAYED, find_model
from openenv_pipe.system.progress import LineProgress
from openenv_pipe.system.resources import load_callable
from openenv_pipe.system.untrusted_json import encodable
from openenv_pipe.types import Episode, Group

_log = logging.getLogger(__name__)
IDLE_S = 900.0  # without a reply, after which a session ends
SCRIPTED_S = 10.0  # for the reply of a scripted policy
PERSON, MODEL = "you", "the model"
Choose = Callable[[], Awaitable[str | None]]


class SteeredEngine(StaticEngine):
    """Gives a person's reply where there is one, and otherwise that of another engine."""

    def __init__(self, engine: Engine, chat: Chat | None, choose: Choose) -> None:
        """choose: waits for the person; returns a reply, or None for the engine's."""
        self.capabilities = engine.capabilities
        self.max_episodes = 1
        self._engine = engine
        self._chat = chat
        self._choose = choose

    async def generate(self, request: Any) -> Completion | TextReply:
        """Return the reply that the person has chosen. Raises EngineError and ConfigError."""
        text = await self._choose()
        if text is None:
            reply: Completion | TextReply = await self._engine.generate(request)
            return reply
        if isinstance(request, TokenRequest):
            assert self._chat is not None
            text = self._chat.writer.own_text(text)
            return written_completion(self._chat, text, request.max_tokens)
        return TextReply(text=text)

    def begin_rollouts(self, num_episodes: int, limit: int) -> int:
        return self._engine.begin_rollouts(num_episodes, limit)

    def end_episode(self, episode: int) -> None:
        self._engine.end_episode(episode)


class CheckpointPlay:
    """Plays one session at a time, which its owner ends. All calls come from one event loop."""

    def __init__(self, runs_dir: Path, *, trust: bool, idle_s: float = IDLE_S) -> None:
        """trust: play also runs whose folders another user made, or that were changed since."""
        self.state: PlayState | None = None  # of the session that goes on, or of the last one
        self.version = 0  # grows with every change of the state
        self._runs_dir = runs_dir
        self._trust = trust
        self._idle_s = idle_s
        self._task: asyncio.Task[None] | None = None
        self._is_ending = False
        self._awaited: asyncio.Future[Any] | None = None  # what the person decides next

    async def start(self, request: PlayRequest) -> None:
        """Start a session, or another episode in it. Raises ConfigError if another goes on."""
        state = self.state
        if state is not None and state.status is not PlayStatus.ENDED:
            is_same = (state.request.run, state.request.checkpoint) == (
                request.run,
                request.checkpoint,
            )
            if not (is_same and state.status is PlayStatus.OVER):
                raise ConfigError(
                    f"a session with {state.request.run} is still open; end it, then start another"
                )
            self._answer(request)
            return
        self.state, self._is_ending = PlayState(request=request), False
        self._change(PlayStatus.STARTING, "starting the environment and loading the model")
        self._task = asyncio.create_task(self._run(self.state))

    async def reply(self, text: str | None) -> None:
        """Give the next reply; None: the model gives it. Raises ConfigError if none is wanted."""
        if self.state is None or self.state.status is not PlayStatus.CHOOSING:
            raise ConfigError("the session waits for no reply now")
        self._answer(text if text is None else encodable(text))

    async def end(self) -> None:
        if self._task is not None:
            self._is_ending = True
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _change(self, status: PlayStatus, note: str = "") -> None:
        assert self.state is not None
        self.state.status, self.state.note = status, note
        self.version += 1

    def _answer(self, value: PlayRequest | str | None) -> None:
        assert self._awaited is not None
        if not self._awaited.done():
            self._awaited.set_result(value)
        self._change(PlayStatus.WORKING)

    async def _decision(self, status: PlayStatus, note: str = "") -> Any:
        """Wait for what the person decides. Raises ConfigError if nothing comes."""
        if self._is_ending:  # A library has caught the cancellation.
            raise ConfigError("ended")
        self._awaited = asyncio.get_running_loop().create_future()
        self._change(status, note)
        try:
            # Not `wait_for`, which in Python 3.11 loses a cancellation that comes with the result.
            async with asyncio.timeout(self._idle_s):
                return await self._awaited
        except TimeoutError:
            raise ConfigError(f"nothing was chosen for {self._idle_s / 60:g} minutes") from None

    async def _run(self, state: PlayState) -> None:
        """Build the parts of the run, play, and take everything down again."""
        why = "ended"
        try:
            assembled = await asyncio.to_thread(_load_pipeline)
            which = f"@{state.request.checkpoint}" if state.request.checkpoint else ""
            word = f"{self._runs_dir / state.request.run}{which}"
            model = await asyncio.to_thread(
                find_model, word, trust=self._trust, secrets_of=set(PLAYED) - {"judge", "beside"}
            )
            state.model = model.name
            if not model.config.agent.is_loop:
                raise ConfigError(
                    f"the episodes of {model.name} are played by a program "
                    f"(agent={model.config.agent.type}), which a person cannot play with"
                )
            if model.config.env.players is not None:
                raise ConfigError(
                    f"a person cannot take a seat in a game of several players (env.players), as "
                    f"in {model.name}; `openenv-pipe env play` plays all of them by hand"
                )
            config = for_play(model.config)
            with tempfile.TemporaryDirectory(prefix="openenv-pipe-play-") as name:
                folder = Path(name)
                progress = LineProgress(lambda text: self._change(PlayStatus.STARTING, text))
                parts = assembled(
                    config, folder, [folder / "verdicts"], progress, checkpoint=model.checkpoint
                )
                async with parts as components:
                    await self._play_episodes(config, components.rollout, state)
        except (PipeError, OSError) as error:
            why = str(error)
        except Exception as error:  # of a library, such as torch's; the viewer goes on
            _log.exception("the session has failed")
            why = f"{type(error).__name__}: {error}"
        finally:
            self._change(PlayStatus.ENDED, why)

    async def _play_episodes(
        self, config: RunConfig, rollout: RolloutContext, state: PlayState
    ) -> None:
        players = {
            name: replies_of(load_callable(target)) for name, target in config.env.baselines.items()
        }
        while True:
            episode = await self._play_episode(config, rollout, state, players)
            note = episode.error or f"the episode ended: {episode.status}"
            state.request = await self._decision(PlayStatus.OVER, note)

    async def _play_episode(
        self,
        config: RunConfig,
        rollout: RolloutContext,
        state: PlayState,
        players: Mapping[str, Replies],
    ) -> Episode:
        tasks = getattr(rollout.splits, state.request.split)
        state.num_tasks, state.max_turns = len(tasks), config.env.max_turns
        if state.request.index >= len(tasks):
            raise ConfigError(f"the {state.request.split} split has tasks 0 to {len(tasks) - 1}")
        task = tasks[state.request.index]
        state.episode, state.opening, state.authors, state.scripted = None, (), [], []
        self._change(PlayStatus.WORKING, "the environment is reset")

        async def choose() -> str | None:
            episode, opening = player.episode_so_far, player.opening
            assert opening is not None
            state.episode, state.opening = episode, opening.messages
            draw = f"{episode.seed}/{len(episode.turns)}"
            replies = {}
            for name, reply in players.items():
                call = reply(episode.observations, random.Random(draw), opening)
                replies[name] = await _scripted_reply(call)
            state.scripted.append(replies)
            text: str | None = await self._decision(PlayStatus.CHOOSING)
            state.authors.append(MODEL if text is None else PERSON)
            return text

        engine = SteeredEngine(rollout.engine, rollout.chat, choose)
        assert isinstance(rollout.loop, LocalRunner)
        seed = secrets.randbits(62)
        spec = EpisodeSpec(
            task=task,
            seed=seed,
            temperature=config.eval.temperature,
            number=engine.begin_rollouts(1, 1),
            group_seed=seed >> 1,
        )
        player = Player(rollout.with_engine(engine), rollout.loop.adapter, spec)
        state.episode = episode = await player.play(rollout.loop.host)
        engine.end_episode(spec.number)
        if not episode.failed:
            await rollout.scorer.score(Group(id="play", task=task, episodes=[episode]))
        return episode


async def _scripted_reply(call: Awaitable[str]) -> str:
    """Return what a scripted policy would reply now, or why it cannot."""
    try:
        async with asyncio.timeout(SCRIPTED_S):
            return await call
    except TimeoutError:
        return f"(no reply in {SCRIPTED_S:g} s)"
    except PipeError as error:
        return f"({error})"


def for_play(config: RunConfig) -> RunConfig:
    """Return the run's configuration for one session and no training.

    Judges and verifiers are not asked, because they may cost money: their terms have no value.
    """
    types = block_types("reward.terms")
    terms = {name: term for name, term in config.reward.terms.items() if not types[term.type].open}
    changes = {
        "beside": {},
        "host": config.host.for_one_session(),
        "reward": config.reward.model_copy(update={"terms": terms}),
        "judge": NoJudgeConfig(type="none"),
        "cluster": LocalClusterConfig(type="local"),
        "trainer": config.trainer.model_copy(update={"devices": 1, "max_staleness": 0}),
    }
    return config.model_copy(update=changes)


def _load_pipeline() -> Any:
    """Import torch and what needs it, which takes seconds; most viewers never play."""
    from openenv_pipe.pipeline.build import assembled

    return assembled
