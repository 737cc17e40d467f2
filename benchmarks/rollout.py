"""Compare the environment steps per second of the episode loop and of a bare WebSocket loop.

Both play the same episodes of Wordle on one local server with the same number of sessions, in
alternation. The bare loop sends ready-made frames and parses the answers. The episode loop does
everything that training does between two completions, from the prompt's token ids to the action's
JSON; only the completions are ready-made.

With many sessions the server's single core limits both. The last two columns, the CPU time of the
playing process, then show the loop's cost.

    PYTHONPATH=. python benchmarks/rollout.py [--sessions 1 8 64] [--rounds 5]
"""

import argparse
import asyncio
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from websockets.asyncio.client import connect

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.base import Completion, TokenRequest
from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.environments.build import build_host
from openenv_pipe.environments.client.session import websocket_url
from openenv_pipe.environments.tasks import Splits
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.rewards import Scorer
from openenv_pipe.rollout import RolloutContext, play_groups
from openenv_pipe.rollout.episode import LocalRunner
from openenv_pipe.types import Finish, Task

GUESS = "zzzzz"  # This is not a word, so every episode has six steps.
NUM_STEPS = 6
EPISODES_PER_SESSION = 40
TASK = Task(id="train/0", split="train", index=0, seed=0, reset={"split": "train", "index": 0})


@dataclass(frozen=True)
class Speed:
    """Environment steps per second, and the process's CPU time per step."""

    steps_per_s: float
    cpu_us_per_step: float


class Clock:
    """A stopwatch that starts when it is created."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def speed(self, num_steps: int) -> Speed:
        wall_s, cpu_s = time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s
        return Speed(num_steps / wall_s, cpu_s / num_steps * 1e6)


class ReadyEngine(ScriptedEngine):
    """An engine that answers every request at once with the same completion."""

    capabilities = VllmEngineConfig.capabilities

    def __init__(self, reply: str, chat: ChatFormat, max_episodes: int) -> None:
        super().__init__(lambda observations, draw: reply)
        self.max_episodes = max_episodes
        token_ids = chat.reply_ids(reply)
        self._completion = Completion(
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            finish=Finish.STOP,
            policy_versions=[0],
        )

    async def generate(self, request: TokenRequest) -> Completion:
        return self._completion


async def bare(url: str, num_sessions: int) -> Speed:
    """Measure a loop that only sends and receives frames."""
    reset = json.dumps({"type": "reset", "data": {**TASK.reset, "seed": TASK.seed}})
    step = json.dumps({"type": "step", "data": {"guess": GUESS}})
    sockets = [await connect(websocket_url(url), compression=None) for _ in range(num_sessions)]

    async def play(socket) -> None:
        for _ in range(EPISODES_PER_SESSION):
            for frame in (reset, *[step] * NUM_STEPS):
                await socket.send(frame)
                json.loads(await socket.recv())

    clock = Clock()
    await asyncio.gather(*(play(socket) for socket in sockets))
    speed = clock.speed(num_sessions * EPISODES_PER_SESSION * NUM_STEPS)
    await asyncio.gather(*(socket.close() for socket in sockets))
    return speed


async def loop(context: RolloutContext, num_sessions: int) -> Speed:
    """Measure the episode loop. It counts steps of the server, not turns of the model."""
    clock = Clock()
    num_episodes = num_sessions * EPISODES_PER_SESSION
    groups = await play_groups(
        context, [TASK], group_size=num_episodes, temperature=1.0, seed=0, label="b"
    )
    return clock.speed(sum(len(t.steps) for e in groups[0].episodes for t in e.turns))


async def measure(num_sessions: int, num_rounds: int) -> tuple[Speed, Speed]:
    """Return the medians of both loops."""
    sessions = f"host.sessions_per_server={num_sessions}"
    as_many_for_the_bare_loop = f"env.variables.MAX_CONCURRENT_ENVS={2 * num_sessions}"
    config = compose(["conf=wordle", sessions, as_many_for_the_bare_loop]).config
    chat = ChatFormat(build_tokenizer())
    engine = ReadyEngine(GUESS, chat, num_sessions)
    with tempfile.TemporaryDirectory() as logs:
        host = build_host(config, Path(logs))
        try:
            await host.start()
            context = RolloutContext(
                env=config.env,
                loop=LocalRunner(host, build_adapter(config.env.adapter)),
                splits=Splits(train=[TASK], eval=[TASK]),
                chat=chat,
                engine=engine,
                scorer=Scorer(config.reward, config.env.success_reward),
            )
            await loop(context, num_sessions)  # warms up
            pairs = [
                (await bare(host.urls[0], num_sessions), await loop(context, num_sessions))
                for _ in range(num_rounds)
            ]
        finally:
            await host.close()
    plain, whole = zip(*pairs, strict=True)
    return median(plain), median(whole)


def median(speeds: tuple[Speed, ...]) -> Speed:
    return Speed(
        statistics.median(speed.steps_per_s for speed in speeds),
        statistics.median(speed.cpu_us_per_step for speed in speeds),
    )


def circumstances() -> str:
    """Describe the date, machine and versions; the load is that before the measurement."""
    versions = " ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("websockets", "openenv", "uvicorn")
    )
    return (
        f"{datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}), load "
        f"{os.getloadavg()[0]:.1f}, python {platform.python_version()}, {versions}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{circumstances()}\n")
    print("| sessions | bare loop, steps/s | episode loop, steps/s | share | CPU us a step | |")
    print("|---|---|---|---|---|---|")
    for num_sessions in arguments.sessions:
        plain, whole = asyncio.run(measure(num_sessions, arguments.rounds))
        share = f"{whole.steps_per_s / plain.steps_per_s:.0%}"
        cpu = f"{plain.cpu_us_per_step:.0f} bare | {whole.cpu_us_per_step:.0f} loop"
        speeds = f"{plain.steps_per_s:.0f} | {whole.steps_per_s:.0f}"
        print(f"| {num_sessions} | {speeds} | {share} | {cpu} |", flush=True)


if __name__ == "__main__":
    main()
