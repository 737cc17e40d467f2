"""The OpenEnv server, whose actions are MCP tools, and `python -m vault.server.app` to run it."""

from typing import Annotated, Any, Literal
from uuid import uuid4

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from ..game import ACTIVITIES, Game, OutOfTurnError

Room = Literal[tuple(ACTIVITIES)]  # type: ignore[valid-type]


class VaultObservation(Observation):
    activity: str = Field(default="", description="What she did when she wrote the code down")


class VaultEnvironment(MCPEnvironment):
    """Plays one game at a time; `reset` starts the next. Each session has its own tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._game: Game | None = None
        self._state = State()
        server = FastMCP("vault")

        @server.tool
        async def look(room: Annotated[Room, Field(description="Where to look")]) -> str:
            """Look into a room."""
            return self._current().look(room)

        @server.tool
        async def unlock(code: Annotated[int, Field(description="Three digits")]) -> str:
            """Try to unlock the vault."""
            return self._current().unlock(code)

        super().__init__(server)

    def _current(self) -> Game:
        if self._game is None:
            raise OutOfTurnError("No game was started. Reset first.")
        return self._game

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        split: str = "train",
        index: int | None = None,
    ) -> VaultObservation:
        """Start the game given by `index`, else by `seed`, else a random one.

        Raises ValueError for a task that does not exist; the game in progress then continues.
        """
        self._game = Game(split, index, seed)
        self._state = State(episode_id=episode_id or str(uuid4()))
        return VaultObservation(activity=self._game.activity)

    async def step_async(
        self, action: Action, timeout_s: float | None = None, **_: Any
    ) -> Observation:
        """List the tools or call one. Only the step that opens the vault earns something."""
        game = self._game
        calls_left = 0 if game is None else game.calls_left
        was_over = game is None or game.is_over
        observation = await super().step_async(action, timeout_s)
        if isinstance(action, CallToolAction):
            observation.reward, observation.done = 0.0, True
            if game is not None and not was_over:
                if game.calls_left == calls_left:
                    game.spend_call()  # No tool ran, so no tool has counted the call.
                self._state.step_count += 1
                observation.reward, observation.done = float(game.is_open), game.is_over
        return observation

    def _step_impl(
        self, action: Action, timeout_s: float | None = None, **_: Any
    ) -> CallToolObservation:
        """Raise ValueError, because all actions of this environment are MCP actions."""
        raise ValueError(f"actions are list_tools and call_tool, got {type(action).__name__}")

    @property
    def state(self) -> State:
        """Return the episode's id and the number of calls; never the code."""
        return self._state


app = create_app(
    VaultEnvironment,
    CallToolAction,
    CallToolObservation,
    env_name="vault",
    max_concurrent_envs=256,
)


def main() -> None:
    """Serve on port 8000 of this machine until SIGTERM or SIGINT."""
    uvicorn.run(app, host="127.0.0.1", port=8000, timeout_graceful_shutdown=2)


if __name__ == "__main__":
    main()
