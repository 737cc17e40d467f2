"""Two environments of kinds that are met in the wild, written to a folder as packages of OpenEnv.

`market`: an action of several fields, with an enum, numbers and a list. `vault`: MCP tools.
"""

from pathlib import Path

MANIFEST = (
    "spec_version: 1\nname: {name}\ntype: space\nruntime: fastapi\napp: server:app\nport: 8000\n"
)

MARKET = '''
from enum import StrEnum

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Side(StrEnum):
    BUY = "buy"
    SELL = "sell"


class Order(Action):
    side: Side
    amount: int = Field(ge=1, le=10, description="How many")
    limits: list[float] = Field(default_factory=list)


class Quote(Observation):
    price: float = 0.0
    wanted: str = ""
    note: str | None = None


class Market(Environment[Order, Quote, State]):
    """Reward 1 for two orders of the wanted side."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self._wanted, self._turn, self._state = ("buy", "sell")[(seed or 0) % 2], 0, State()
        return Quote(price=1.5, wanted=self._wanted)

    def step(self, action, timeout_s=None, **_):
        self._turn += 1
        reward = 0.5 * (action.side == self._wanted)
        quote = Quote(price=2.5, wanted=self._wanted, note=str(sum(action.limits)))
        quote.reward, quote.done = reward, self._turn == 2
        return quote

    @property
    def state(self):
        return self._state


app = create_app(Market, Order, Quote, env_name="market", max_concurrent_envs=16)
'''

VAULT = '''
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Vault(MCPEnvironment):
    """Add two numbers with one tool, open the vault with their sum by the other."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("vault")

        @mcp.tool()
        def add(a: int, b: int) -> int:
            """The sum of two numbers."""
            return a + b

        @mcp.tool()
        def unlock(code: int) -> str:
            """Open the vault."""
            return "open" if code == self._code else "locked"

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **_):
        self._code, self._state = (seed or 0) + 2, State()
        return Observation(metadata={"question": f"The code is {self._code - 2} + 2."})

    async def step_async(self, action, timeout_s=None, **_):
        observation = await super().step_async(action, timeout_s=timeout_s)
        result = getattr(observation, "result", None)
        if result is not None and result.data == "open":
            observation.reward, observation.done = 1.0, True
        return observation

    def _step_impl(self, action, timeout_s=None, **_):
        raise TypeError(f"no such action: {action}")

    @property
    def state(self):
        return self._state


app = create_app(
    Vault, CallToolAction, CallToolObservation, env_name="vault", max_concurrent_envs=16
)
'''


def write_packages(folder: Path) -> None:
    """`folder`/envs/market and `folder`/envs/vault, found by their names from `folder`."""
    for name, source in {"market": MARKET, "vault": VAULT}.items():
        package = folder / "envs" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "server.py").write_text(source)
        (package / "openenv.yaml").write_text(MANIFEST.format(name=name))
