"""Unusual environments like those that others publish, written to a folder as OpenEnv packages.

`market` has an action of several fields, with an enum, numbers and a list. `vault` has MCP tools.
`island` needs its container's way of starting: its modules import each other from inside the
package, one of them has the name of a library's module, and its manifest has the older form without
`app` and `port`. `island` allows one session, needs an environment variable, and raises on invalid
moves. Each action of `auction` costs something, so that a model earns most if it never acts.
"""

import sys
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

AUCTION = '''
from typing import Literal

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Bid(Action):
    lot: Literal[tuple("abcdefghijklmnopqrstuvwxyz")]


class Call(Observation):
    text: str = ""


class Auction(Environment[Bid, Call, State]):
    """One bid: -0.2 for each of the lots a to m, -1 for each of the others."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self._state = State()
        return Call(text=f"sale {(seed or 0) % 8}")

    def step(self, action, timeout_s=None, **_):
        return Call(reward=-0.2 if action.lot <= "m" else -1.0, done=True)

    @property
    def state(self):
        return self._state


app = create_app(Auction, Bid, Call, env_name="auction", max_concurrent_envs=32)
'''


ISLAND = {
    "openenv.yaml": """name: island
version: "0.1.0"
description: Walk to the east coast
action: Move
observation: Spot
""",
    "fastapi.py": """raise RuntimeError("this is no library")
""",
    "models.py": """from openenv.core.env_server.types import Action, Observation


class Move(Action):
    direction: str


class Spot(Observation):
    place: str = ""
    seen_from: list[dict[str, str | None]] = []
""",
    "server/app.py": '''import os

from models import Move, Spot
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

COASTS = ["west coast", "middle", "east coast"]
PYTHON = os.environ.get("ISLAND_PYTHON", "")


class Island(Environment[Move, Spot, State]):
    """Reward 1 on the east coast."""

    def __init__(self):
        super().__init__()
        if os.environ["ISLAND_NAME"] == "Atlantis":
            print("the island has sunk")
            raise RuntimeError

    def reset(self, seed=None, episode_id=None, **_):
        self._at, self._state = 0, State()
        return Spot(place=os.environ["ISLAND_NAME"], seen_from=[{"tower": PYTHON, "sea": None}])

    def step(self, action, timeout_s=None, **_):
        self._at += {"east": 1, "west": -1}[action.direction]
        done = COASTS[self._at] == "east coast"
        return Spot(place=COASTS[self._at], reward=float(done), done=done)

    @property
    def state(self):
        return self._state


app = create_app(Island, Move, Spot, env_name="island")
''',
}


def write_island(folder: Path) -> Path:
    """Write `folder`/island and return the package's folder."""
    for name, text in ISLAND.items():
        path = folder / "island" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "island"


def write_python(folder: Path) -> Path:
    """Write the executable of another Python, which sets ISLAND_PYTHON for environments it runs."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nISLAND_PYTHON=other exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


def write_packages(folder: Path) -> None:
    """Write the packages market, vault and auction to `folder`/envs, where names find them."""
    for name, source in {"market": MARKET, "vault": VAULT, "auction": AUCTION}.items():
        package = folder / "envs" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "server.py").write_text(source)
        (package / "openenv.yaml").write_text(MANIFEST.format(name=name))
