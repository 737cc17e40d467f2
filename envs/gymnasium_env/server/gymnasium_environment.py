"""The OpenEnv environment around one of Gymnasium; `source` makes it, `spaces` has its types."""

from typing import Any
from uuid import uuid4

import gymnasium
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata, State

from ..models import GymnasiumAction, GymnasiumObservation
from ..source import Source, without_colors
from ..spaces import as_text, legal_actions, native, plain


class GymnasiumEnvironment(Environment[GymnasiumAction, GymnasiumObservation, State]):
    """Plays one episode at a time; `reset` starts the next.

    It has no asynchronous methods, because an environment may take long: OpenEnv runs synchronous
    methods in one thread per session, where they do not block other sessions.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._env: gymnasium.Env[Any, Any] | None = None
        self._is_playing = False
        self._state = State()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> GymnasiumObservation:
        """Start an episode with a seed, else a random one. Keywords are Gymnasium's `options`."""
        if self._env is None:
            self._env = self._source.make()
        value, info = self._env.reset(seed=seed, options=options or None)
        self._is_playing = True
        self._state = State(episode_id=episode_id or str(uuid4()))
        observation = self._observe(value, info)
        observation.rules = self._source.rules
        return observation

    def step(
        self, action: GymnasiumAction, timeout_s: float | None = None, **_: Any
    ) -> GymnasiumObservation:
        """Take one action. The episode is done when Gymnasium has terminated or truncated it.

        Before the first `reset` and after the end, it returns `done`, a message and no reward.
        """
        if self._env is None or not self._is_playing:
            message = "No episode is in progress. Reset to start one."
            return GymnasiumObservation(message=message, reward=0.0, done=True)
        chosen = native(self._source.action_space, action.action)
        value, reward, terminated, truncated, info = self._env.step(chosen)
        self._is_playing = not (terminated or truncated)
        self._state.step_count += 1
        observation = self._observe(value, info)
        observation.reward = float(reward)
        observation.done = not self._is_playing
        observation.terminated, observation.truncated = bool(terminated), bool(truncated)
        return observation

    def _observe(self, value: Any, info: dict[str, Any]) -> GymnasiumObservation:
        source, sent = self._source, plain(value)
        success = info.get("is_success")
        drawing = without_colors(str(self._env.render())) if self._env and source.draws else ""
        legal = legal_actions(source.action_space, info.get("action_mask"))
        return GymnasiumObservation(
            text=drawing.strip("\n") or as_text(sent),
            value=sent if source.sends_values else None,
            legal_actions=legal if self._is_playing else [],
            is_success=None if success is None else bool(success),
        )

    def close(self) -> None:
        """Close Gymnasium's environment."""
        if self._env is not None:
            self._env.close()
            self._env = None

    @property
    def state(self) -> State:
        """Return the episode's id and the number of actions taken."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the answer to `GET /metadata`."""
        return EnvironmentMetadata(
            name="gymnasium", description=self._source.rules, version="0.1.0"
        )
