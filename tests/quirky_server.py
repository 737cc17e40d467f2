"""An OpenEnv server, made with OpenEnv itself, whose environment is broken or odd in many ways.

The reset keyword `quirk` chooses the way. Without one, the task is to say a number, in one step.
"""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import BaseModel

SLOW_S = 0.4  # of a reset with the quirk `slow`
MAX_SESSIONS = 32
START_LIMIT_S = 60.0


class Say(Action):
    """Say the number that is wanted, as digits."""

    number: int


class Heard(Observation):
    text: str = ""
    error: str = ""
    seconds_taken: float = 0.0
    reward: Any = None


class Unlike(BaseModel):
    text: str = "no observation"


class Quirky(Environment[Say, Heard, State]):
    """Earns 1 for the wanted number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, quirk: str = "", task: str = "", **_: Any) -> Any:
        self._quirk, self._wanted, self._turn = quirk, (seed or 0) % 7, 0
        self._draw = random.Random(seed)
        self._state = State()
        text = f"say {self._wanted}"
        match quirk:
            case "reset raises":
                raise RuntimeError("the data are not there")
            case "reset returns a tuple":
                return Heard(text=text), {}
            case "done at reset":
                return Heard(text="SOME_KEY is not set", done=True)
            case "needs a keyword" if not task:
                return Heard(error="reset needs the keyword `task`")
            case "empty":
                return Heard()
            case "huge":
                return Heard(text=text + "x" * 200_000)
            case "clock":
                return Heard(text=f"{text}; it is {datetime.now()}")
            case "slow":
                time.sleep(SLOW_S)
        return Heard(text=text)

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Any:
        self._turn += 1
        self._state.step_count += 1
        reward, done = float(action.number == self._wanted), True
        heard = Heard(text="heard", reward=reward, done=True, seconds_taken=time.perf_counter() % 1)
        match self._quirk:
            case "step returns a tuple":
                return heard, reward, done
            case "step returns nothing":
                return None
            case "step returns a dict":
                return {"text": "heard", "reward": reward, "done": done}
            case "step is a coroutine":
                coroutine = self._later()
                coroutine.close()  # Otherwise Python warns of it.
                return coroutine
            case "step returns another model":
                return Unlike()
            case "every action raises":
                raise ValueError(f"{{{action.number}}} is not allowed")
            case "half of the actions raise" if self._draw.random() < 0.5:
                raise ValueError("bad luck")
            case "half of the steps return a tuple" if self._draw.random() < 0.5:
                return heard, reward
            case "reward is null":
                heard.reward = None
            case "reward is a text":
                heard.reward = "great"
            case "never done":
                heard.done = False
            case "done at random":
                heard.done = self._draw.random() < 0.3
            case "anything goes":
                heard.reward = float(action.number % 2 == 0)
            case "long game":
                heard.done, heard.text = self._turn == 20, "x" * 400
                heard.reward = heard.reward if heard.done else 0.0
            case "empty":
                return Heard(reward=reward, done=True)
        return heard

    async def _later(self) -> Heard:
        return Heard()

    @property
    def state(self) -> State:
        return self._state


@contextmanager
def quirky_server(num_sessions: int = MAX_SESSIONS) -> Iterator[str]:
    """Run the server in a thread; yield its URL."""
    app = create_app(Quirky, Say, Heard, env_name="quirky", max_concurrent_envs=num_sessions)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        latest_s = time.monotonic() + START_LIMIT_S
        while not server.started and time.monotonic() < latest_s:
            time.sleep(0.02)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(START_LIMIT_S)
