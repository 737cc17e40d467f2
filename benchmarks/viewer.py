"""Measure the viewer's answers over many episodes, its memory, and what it costs a training.

    python benchmarks/viewer.py [--episodes 100000] [--rounds 5] [--steps 40]

First it writes a run of many episodes of four turns, then starts `openenv-pipe view` and asks for
the list, a reward filter, a text search and one episode, as a browser does. A row's figure is the
median of the rounds; the index of episodes is made before. Then it trains `conf=echo`, while a page
follows the run in every other window of five steps, and compares the windows: the seconds of a
step, and the processor time that the training and the viewer spend on it, which other work on the
machine changes less. Prints tables in Markdown.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median
from urllib.request import HTTPCookieProcessor, build_opener, install_opener, urlopen

import psutil

from openenv_pipe.config.compose import compose
from openenv_pipe.extras.viewer.episodes.index import index_episodes
from openenv_pipe.runs.episodes import episodes_path, write_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.types import Episode, Finish, Group, Status, Step, Task, Turn

ROOT = Path(__file__).parents[1]
LIMIT_S = 900.0
NUM_WORDS, NUM_GROUPS, GROUP_SIZE, NUM_TURNS = 20_000, 8, 8, 4
WINDOW = 5  # steps


def make_run(runs_dir: Path, num_episodes: int) -> str:
    """Write a run of many episodes; return a word that some of them contain."""
    random = Random(0)
    words = ["".join(random.choices("abcdefghijklmnop", k=7)) for _ in range(NUM_WORDS)]
    config = compose(["conf=echo", f"runs_dir={runs_dir}", "name=many"]).config
    folder = RunFolder.create(config, overrides=[], command=[])
    for step in range(1, num_episodes // (NUM_GROUPS * GROUP_SIZE) + 1):
        groups = []
        for number in range(NUM_GROUPS):
            index = random.randrange(2000)
            task = Task(id=f"train/{index}", split="train", index=index, seed=index)
            members = [_episode(random, task, member, words) for member in range(GROUP_SIZE)]
            groups.append(Group(id=f"step {step}/{number}", task=task, episodes=members))
        path = episodes_path(folder.path, step)
        write_episodes(path, groups)
        index_episodes(folder.path, path)
    folder.finish("finished")
    return words[0]


def _episode(random: Random, task: Task, member: int, words: list[str]) -> Episode:
    turns = []
    for _ in range(NUM_TURNS):
        reply = " ".join(random.choices(words, k=40))
        observation = {"text": " ".join(random.choices(words, k=20))}
        turns.append(
            Turn(
                prompt_ids=random.choices(range(50_000), k=30),
                completion_ids=random.choices(range(50_000), k=60),
                logprobs=[-random.random() for _ in range(60)],
                finish=Finish.STOP,
                policy_versions=[0],
                reply=reply,
                steps=[Step(action={"text": reply}, observation=observation)],
            )
        )
    reward = random.random()
    return Episode(
        task=task,
        member=member,
        seed=member,
        turns=turns,
        status=Status.DONE,
        reward=reward,
        reward_terms={"env": reward},
        success=reward > 0.5,
    )


@contextmanager
def viewer(runs_dir: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Serve the runs; yield the address and the process."""
    command = [sys.executable, "-m", "openenv_pipe.cli.main", "view", str(runs_dir)]
    server = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        found = re.search(r"(http://\S+/)\?token=[\w-]+", server.stderr.readline())
        assert found
        install_opener(build_opener(HTTPCookieProcessor()))
        urlopen(found[0], timeout=LIMIT_S).close()  # Its answer sets the cookie.
        yield found[1], psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait()


def ask(address: str) -> tuple[float, dict]:
    """Return the milliseconds until the whole answer is there, and the answer."""
    started = time.perf_counter()
    with urlopen(address, timeout=LIMIT_S) as answer:
        content = answer.read()
    return 1000 * (time.perf_counter() - started), json.loads(content)


def measure_answers(runs_dir: Path, word: str, rounds: int) -> None:
    episodes = "api/runs/many/0001/episodes"
    questions = {
        "list": episodes,
        "list by reward": f"{episodes}?order=reward&way=down",
        "filter by reward": f"{episodes}?reward_from=0.25&reward_below=0.3",
        "text search": f"{episodes}?text={word}",
        "text search, one letter": f"{episodes}?text={word[0]}",
        "text search and reward": f"{episodes}?text={word}&reward_from=0.5&order=reward",
        "tasks": "api/runs/many/0001/tasks",
        "one episode": "api/runs/many/0001/episode?step=9&line=9",
        "its tokens": "api/runs/many/0001/tokens?step=9&line=9",
        "table of runs": "api/runs",
    }
    print("| question | found | ms |\n|---|---|---|")
    with viewer(runs_dir) as (address, process):
        ask(address + episodes)
        for name, question in questions.items():
            answers = [ask(address + question) for _ in range(rounds)]
            found = answers[0][1]
            total = found.get("total", "") if isinstance(found, dict) else len(found)
            print(f"| {name} | {total} | {median(ms for ms, _ in answers):.0f} |")
        print(f"\nThe viewer's memory: {process.memory_info().rss / 2**20:.0f} MB.\n")


@dataclass
class Window:
    """What a window of steps took, per step."""

    is_viewed: bool
    step_s: float
    training_cpu_s: float  # of the training's processes, the environment's servers included
    viewer_cpu_s: float


def measure_training(runs_dir: Path, num_windows: int) -> list[Window]:
    """Train; return the windows, of which a page follows every other one."""
    runs_dir.mkdir(exist_ok=True)
    steps = 2 * WINDOW * (num_windows + 1)  # more than enough: the training is ended
    command = [
        *(sys.executable, "-m", "openenv_pipe.cli.main", "train", "conf=echo"),
        *(f"runs_dir={runs_dir}", f"trainer.steps={steps}", "eval.num_tasks=1"),
        *("eval.baselines=false", "trainer.checkpoint.every=1000", "num_threads=1"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    with viewer(runs_dir) as (address, server):
        training = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            process = psutil.Process(training.pid)
            metrics = runs_dir / "echo" / "0001" / "metrics.jsonl"
            _wait_for_step(training, metrics, WINDOW)  # until caches are warm
            return [
                _window(number, address, server, training, process, metrics)
                for number in range(num_windows)
            ]
        finally:
            training.terminate()
            training.wait()


def _window(
    number: int,
    address: str,
    server: psutil.Process,
    training: subprocess.Popen[bytes],
    process: psutil.Process,
    metrics: Path,
) -> Window:
    is_viewed, over = number % 2 == 0, threading.Event()
    page = threading.Thread(target=_follow, args=(address, over))
    if is_viewed:
        page.start()
    first = _last_step(metrics) + 1
    _wait_for_step(training, metrics, first)
    started = time.perf_counter(), _processor_s(process), _processor_s(server)
    _wait_for_step(training, metrics, first + WINDOW)
    ended = time.perf_counter(), _processor_s(process), _processor_s(server)
    over.set()
    if is_viewed:
        page.join()
    took = [(end - start) / WINDOW for start, end in zip(started, ended, strict=True)]
    return Window(is_viewed, *took)


def _last_step(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def _wait_for_step(training: subprocess.Popen[bytes], metrics: Path, step: int) -> None:
    latest = time.monotonic() + LIMIT_S
    while _last_step(metrics) < step:
        if training.poll() is not None or time.monotonic() > latest:
            raise SystemExit(f"the training has not taken {step} steps")
        time.sleep(0.02)


def _processor_s(process: psutil.Process) -> float:
    """Return the processor time of a process and its children so far."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def print_training(windows: list[Window]) -> None:
    parts = {each: [w for w in windows if w.is_viewed is each] for each in (False, True)}
    rows = {
        "seconds": lambda window: window.step_s,
        "processor time of the training, s": lambda window: window.training_cpu_s,
        "processor time of the viewer, s": lambda window: window.viewer_cpu_s,
    }
    print("| per step, median of the windows | without a page | with a page | ratio |")
    print("|---|---|---|---|")
    for name, read in rows.items():
        alone, viewed = (median(map(read, parts[each])) for each in (False, True))
        ratio = f"{viewed / alone:.3f}" if alone > 0.001 else ""
        print(f"| {name} | {alone:.3f} | {viewed:.3f} | {ratio} |")
    extra, own = (
        median(read(window) for window in parts[True])
        for read in (lambda window: window.viewer_cpu_s, lambda window: window.training_cpu_s)
    )
    print(
        f"\n{WINDOW * len(windows)} steps in windows of {WINDOW}. While a page follows the run, "
        f"the viewer uses {100 * extra / own:.2f} % of the training's processor time. On a machine "
        "without a free core, this is what it costs in steps per second."
    )


def _follow(address: str, over: threading.Event) -> None:
    """Do what the page of a run does: ask again whenever an event says that it has changed."""
    key = None
    while key is None and not over.wait(0.2):
        _, found = ask(f"{address}api/runs")
        running = [run["key"] for run in found["runs"] if run["status"] == "running"]
        key = running[-1] if running else None
    if key is None:
        return
    run, epoch, after = f"{address}api/runs/{key}", 0, 0
    with urlopen(f"{run}/events", timeout=LIMIT_S) as events:
        for line in events:
            if over.is_set():
                return
            if line.startswith(b"data:"):
                ask(f"{run}/progress")
                _, curves = ask(f"{run}/curves?epoch={epoch}&after={after}")
                epoch, after = curves["epoch"], curves["start"] + len(curves["steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=100_000, help="0: no answers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="0: no training")
    options = parser.parse_args()
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}; {options.episodes:,} episodes of {NUM_TURNS} turns\n"
    )
    with tempfile.TemporaryDirectory() as scratch:
        runs_dir = Path(scratch) / "runs"
        if options.episodes:
            measure_answers(runs_dir, make_run(runs_dir, options.episodes), options.rounds)
    if not options.steps:
        return
    with tempfile.TemporaryDirectory() as scratch:
        print_training(measure_training(Path(scratch) / "runs", max(2, options.steps // WINDOW)))


if __name__ == "__main__":
    main()
