"""Train agents that people use for two steps each, and compare every call with the engine's record.

    python benchmarks/program_agents.py FOLDER [--engine vllm] [--only opencode codex]

The agents are installed into FOLDER in pinned versions, by npm and pip, if they are not there yet.
Each writes Python for the environment `coding` with a small model of its own that can call its
tools (`program_agents_model.py`). For every call in the episodes' files, prompt, sampled ids and
logprobs have to be those of a call that the engine has answered.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
import venv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from program_agents_model import build_model

from openenv_pipe import train
from openenv_pipe.engines.local import LocalEngine
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.types import Episode, TurnRole, path_to

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "agents"
NUM_STEPS = 2
SETTINGS = (
    *("model=hub", "model.lora.rank=0", "model.dtype=float32"),
    *("model.autocast=float32", "device=cpu", "num_threads=1", "agent.max_calls=6"),
    *("env.max_episode_tokens=24000", "env.max_reply_tokens=16", "trainer=grpo"),
    *(f"trainer.steps={NUM_STEPS}", "trainer.tasks_per_step=1", "trainer.group_size=3"),
    *("trainer.tokens_per_batch=40000", "trainer.optimizer.lr=1e-4", "eval.num_tasks=1"),
    *("eval.samples_per_task=1", "eval.temperature=1.0", "eval.baselines=false"),
    # Each last answer is worth something, so that the rewards of a group differ.
    "+reward.terms.last={type: regex, pattern: done, weight: 0.1, per_turn: true}",
)
WRONG = "def f():\n    return 1"
FORBIDDEN = (
    "import os\nos.system('ls')\ndef f():\n    return 1"  # It ends the episode and costs 0.5.
)
LAST = "I am done."
Record = Callable[[Sequence[int], Sequence[int], Sequence[float]], None]
Key = tuple[bytes, bytes, bytes]


@dataclass(frozen=True, kw_only=True)
class Agent:
    """An agent, as it is installed and started, and what its model has to be able to say."""

    packages: tuple[str, ...]  # the first has the version that counts
    dialect: str
    submit: Callable[[str], tuple[str, dict[str, Any]]]  # the tool call that hands in a program
    look: tuple[str, dict[str, Any]] | None = None  # another tool call
    script: str | None = None  # from examples/agents on; None: a package of npm
    conf: str = "coding"

    def replies(self) -> dict[str, float]:
        """Return what the model says, with probabilities."""
        calls = [(self.submit(WRONG), 0.4), (self.submit(FORBIDDEN), 0.25)]
        calls += [(self.look, 0.2)] if self.look else []
        spoken = {_call(*call): share for call, share in calls}
        return {**spoken, LAST: 1.0 - sum(spoken.values())}


def _curl(code: str) -> str:
    action = json.dumps({"action": {"code": code}}).replace("'", "'\\''")
    return (
        'curl -s "$OPENENV_URL/step" -H "Content-Type: application/json" -d ' + "'" + action + "'"
    )


AGENTS = {
    "opencode": Agent(
        packages=("opencode-ai@1.18.33",),
        dialect="chat completions, streamed",
        submit=lambda code: ("openenv_step", {"code": code}),
        look=("bash", {"command": "ls", "description": "Look around"}),
    ),
    "pi": Agent(
        packages=("@mariozechner/pi-coding-agent@0.73.1",),
        dialect="chat completions, streamed",
        submit=lambda code: ("bash", {"command": _curl(code)}),
        look=("bash", {"command": "ls"}),
    ),
    "codex": Agent(
        packages=("@openai/codex@0.169.0",),
        dialect="Responses, streamed",
        submit=lambda code: ("mcp__openenv__step", {"code": code}),
        look=("exec_command", {"cmd": "ls"}),
    ),
    "smolagents": Agent(
        packages=("smolagents[openai]==1.26.0",),
        dialect="chat completions",
        submit=lambda code: ("hand_in", {"code": code}),
        look=("final_answer", {"answer": "done"}),
        script="smolagents_agent.py",
    ),
    "openai_agents": Agent(
        packages=("openai-agents==0.24.0",),
        dialect="Responses",
        submit=lambda code: ("step", {"code": code}),
        script="openai_agents_agent.py",
    ),
    "langgraph": Agent(
        packages=("langgraph==1.2.22", "langchain-openai==1.7.3"),
        dialect="chat completions",
        submit=lambda code: ("hand_in", {"code": code}),
        script="langgraph_agent.py",
    ),
    "openai": Agent(
        packages=("openai==3.54.0",),
        dialect="chat completions",
        submit=lambda code: ("say", {"message": ascii_lowercase if code == WRONG else "?"}),
        script="two_roles.py",
        conf="echo",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    parser.add_argument("--only", nargs="+", choices=tuple(AGENTS), default=tuple(AGENTS))
    given = parser.parse_args()
    folder = given.folder.resolve()
    install(folder, [AGENTS[name] for name in given.only])
    os.environ["PATH"] = f"{folder}/npm/node_modules/.bin:{os.environ['PATH']}"
    torch.set_num_threads(1)  # Two would wait for each other on a busy machine.
    os.chdir(EXAMPLES)  # for its conf/ and its scripts
    print(f"engine={given.engine}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}\n")
    titles = "| agent | version | interface | calls | samples | roles | statuses | trained tokens"
    print(titles + " | engine and trainer differ by at most | seconds |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in given.only:
        print(row_of(name, AGENTS[name], given.engine, folder), flush=True)


def install(folder: Path, agents: Sequence[Agent]) -> None:
    """Install the agents that are not there yet."""
    python, npm = folder / "python", folder / "npm"
    by_pip = [package for agent in agents if agent.script for package in agent.packages]
    by_npm = [package for agent in agents if not agent.script for package in agent.packages]
    if by_pip:
        if not python.exists():
            venv.create(python, with_pip=True)
        subprocess.run([python / "bin/python", "-m", "pip", "install", "-q", *by_pip], check=True)
    if by_npm:
        npm.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--prefix", npm, "--no-audit", "--no-fund", *by_npm]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def row_of(name: str, agent: Agent, engine: str, folder: Path) -> str:
    """Train an agent, compare its calls with the engine's, and return a line of the table."""
    model = folder / "models" / name
    if not model.exists():
        texts = [path.read_text() for path in sorted(ROOT.glob("docs/*.md"))]
        build_model(model, texts, agent.replies())
    settings = [f"conf={agent.conf}", *SETTINGS, f"model.path={model}", f"engine={engine}"]
    settings += [f"runs_dir={folder}/runs", f"name={name}"]
    settings += [f"agent={name if agent.conf == 'coding' else 'program'}"]
    if agent.script:
        settings.append(f"agent.command=['{folder}/python/bin/python','{agent.script}']")
    begun_s = time.monotonic()
    with recorded(engine) as record:
        run = train(*settings, on_progress=lambda text: print(text, file=sys.stderr))
    spent_s = time.monotonic() - begun_s
    episodes = [
        episode
        for step in range(1, NUM_STEPS + 1)
        for group in read_episodes(episodes_path(run.path, step))
        for episode in group.episodes
    ]
    answered = Counter(record)
    calls = Counter(key for episode in episodes for key in calls_of(episode))
    if missing := calls - answered:
        raise SystemExit(f"{name}: {missing.total()} calls are not those of the engine")
    metrics = [each for each in read_metrics(run.path / "metrics.jsonl") if each["step"]]
    differences = [each["mismatch/max"] for each in metrics if "mismatch/max" in each]
    columns = (
        *(name, agent.packages[0], agent.dialect, calls.total()),
        sum(map(num_samples, episodes)),
        _counted(turn.role.value for episode in episodes for turn in episode.turns),
        _counted(episode.status.value for episode in episodes),
        sum(each.get("tokens/trained", 0) for each in metrics),
        f"{max(differences):.1e}" if differences else "nothing trained",
        f"{spent_s:.0f}",
    )
    return f"| {' | '.join(map(str, columns))} |"


@contextmanager
def recorded(engine: str) -> Iterator[list[Key]]:
    """Yield the list of all calls that an engine answers within the block, as it answers them."""
    record: list[Key] = []
    if engine == "local":
        generate = LocalEngine.generate

        async def generate_recorded(self: LocalEngine, request: Any) -> Any:
            completion = await generate(self, request)
            record.append(_key(request.prompt_ids, *_sampled(completion)))
            return completion

        LocalEngine.generate = generate_recorded
        try:
            yield record
        finally:
            LocalEngine.generate = generate
        return
    ask = VllmClient._generate

    async def ask_recorded(self: VllmClient, model: str, ids: Sequence[int], sampling: Any) -> Any:
        answer = await ask(self, model, ids, sampling)
        for choice in answer["choices"]:  # the server's own words
            if logprobs := choice.get("logprobs"):
                values = [each["logprob"] for each in logprobs["content"]]
                record.append(_key(ids, choice["token_ids"], values))
        return answer

    VllmClient._generate = ask_recorded
    try:
        yield record
    finally:
        VllmClient._generate = ask


def calls_of(episode: Episode) -> Iterator[Key]:
    """Yield the calls of an episode as its file has them."""
    for index, turn in enumerate(episode.turns):
        prompt: list[int] = []
        for before in path_to(index, episode.parents)[:-1]:
            prompt += episode.turns[before].prompt_ids + episode.turns[before].completion_ids
        yield _key([*prompt, *turn.prompt_ids], turn.completion_ids, turn.logprobs)


def num_samples(episode: Episode) -> int:
    """Count the paths of an episode that can be trained."""
    agents = {i for i, turn in enumerate(episode.turns) if turn.role is TurnRole.AGENT}
    return len(agents - {episode.parents[index] for index in agents})


def _sampled(completion: Any) -> tuple[Sequence[int], Sequence[float]]:
    return completion.token_ids, completion.logprobs


def _key(prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float]) -> Key:
    return (
        np.asarray(prompt, np.int64).tobytes(),
        np.asarray(ids, np.int64).tobytes(),
        np.asarray(logprobs, np.float32).tobytes(),
    )


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _counted(values: Iterator[str]) -> str:
    return ", ".join(f"{value} {count}" for value, count in sorted(Counter(values).items()))


if __name__ == "__main__":
    main()
