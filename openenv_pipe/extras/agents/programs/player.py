"""Let a program play one episode: start it, watch it, and tell how it ended."""

import asyncio
import json
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.extras.agents.gateway import Gateway, Rollout
from openenv_pipe.extras.agents.player import AgentPlayer
from openenv_pipe.extras.agents.programs.program import (
    VARIABLES,
    Address,
    make_program,
    results_folder,
    take_output,
)
from openenv_pipe.extras.agents.programs.settling import wait_until_settled
from openenv_pipe.extras.agents.schema import ProgramAgentConfig
from openenv_pipe.registry import block_types, load
from openenv_pipe.rollout.context import EpisodeSpec, PlayContext
from openenv_pipe.rollout.episode import LocalRunner
from openenv_pipe.rollout.sandbox import ProgramStartError, RunningProgram, Sandbox
from openenv_pipe.system.child_environment import child_environment, names_left_out
from openenv_pipe.system.files import digest_of_file
from openenv_pipe.system.untrusted_json import parse_untrusted
from openenv_pipe.system.untrusted_text import shortened
from openenv_pipe.system.user_numbers import MAX_REWARD
from openenv_pipe.types import Episode, Opening, Status

RESULTS = "*/*/result.json"  # JOB/TRIAL/result.json
REWARD = "reward"  # the name of the number that is the reward
MAX_BYTES = 16 * 2**20  # of a result that is read
MAX_LENGTH = 300  # characters of what Harbor says of an exception
WATCH_S = 0.25  # between two checks of a program's limits; its end is noticed at once
SIGNALS = 128  # exit codes above it are signals
MAX_ERROR_LENGTH = 300  # characters of a program's last words in the episode's error


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    reward: float | None = None  # None: there is none
    numbers: Mapping[str, float] = field(default_factory=dict)  # all of them, by name
    problem: str = ""  # why there is no reward


def take_verdict(results: Path) -> TrialResult:
    """Read the verdict of the one trial in a folder of Harbor's jobs, and remove the folder."""
    try:
        found = list(results.glob(RESULTS))
        if len(found) != 1:
            return TrialResult(problem=f"Harbor left {len(found)} results of trials, expected 1")
        with found[0].open("rb") as file:
            return read_verdict(file.read(MAX_BYTES))
    except OSError as error:
        return TrialResult(problem=f"the result of Harbor's trial cannot be read: {error}")
    finally:
        shutil.rmtree(results, ignore_errors=True)


def read_verdict(data: bytes) -> TrialResult:
    try:
        result = parse_untrusted(data)
    except ValueError as error:
        return TrialResult(problem=f"the result of Harbor's trial is not JSON: {error}")
    numbers = _member(_member(result, "verifier_result"), "rewards")
    usable = {str(name): float(value) for name, value in numbers.items() if _is_number(value)}
    if REWARD in usable:
        return TrialResult(reward=usable[REWARD], numbers=usable)
    exception = _member(result, "exception_info")
    if exception:
        said = f"{exception.get('exception_type')}: {exception.get('exception_message')}"
        return TrialResult(problem=shortened(said, MAX_LENGTH))
    seen = shortened(json.dumps(numbers), MAX_LENGTH)
    return TrialResult(
        problem=f"the verifier wrote {seen}, expected a number named {REWARD}, "
        f"of at most {MAX_REWARD:g} in absolute value",
    )


def _member(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = parent.get(name) if isinstance(parent, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and abs(value) <= MAX_REWARD


class Programs(LocalRunner):
    def __init__(
        self,
        loop: LocalRunner,
        config: ProgramAgentConfig,
        *,
        sandbox: Sandbox,
        gateway: Gateway,
        digests: dict[str, JsonValue],
        folder: Path,
    ) -> None:
        """
        loop: has the sessions of the programs.
        digests: of the files that the programs consist of, by name.
        folder: for the folders and the output of programs that run.
        """
        super().__init__(loop.host, loop.adapter)
        self.config = config
        self.sandbox = sandbox
        self.gateway = gateway
        self.digests = digests
        self.folder = folder

    def facts(self) -> dict[str, JsonValue]:
        return {**super().facts(), "program": self.digests, **self.sandbox.facts}

    async def play(self, context: PlayContext, spec: EpisodeSpec) -> Episode:
        return await ProgramPlayer(self, context, spec).play(self.host)


@asynccontextmanager
async def serving_programs(
    loop: LocalRunner, config: ProgramAgentConfig, logs: Path, *, level: str
) -> AsyncIterator[Programs]:
    """Serve programs until the end of the block. Raises OSError, HostError and ConfigError."""
    build = block_types("agent.sandbox")[config.sandbox.type].build
    open_sandbox = await asyncio.to_thread(load, build)
    async with open_sandbox(config.sandbox, config.command, logs) as sandbox:
        digests: dict[str, JsonValue] = {
            path.name: await asyncio.to_thread(digest_of_file, path) for path in sandbox.files
        }
        gateway = Gateway(level=level, path=sandbox.socket, url=sandbox.url)
        async with gateway.serving():
            yield Programs(
                loop,
                config,
                sandbox=sandbox,
                gateway=gateway,
                digests=digests,
                folder=logs.absolute() / "programs",
            )


def open_programs(
    config: RunConfig, loop: LocalRunner, logs: Path, notify: Callable[[str], None]
) -> AbstractAsyncContextManager[Programs]:
    """Serve the programs of `agent=program`; see `rollout.episode.own_loop`."""
    assert isinstance(config.agent, ProgramAgentConfig)
    level = "tokens" if config.engine.capabilities.takes == "token_ids" else "text"
    return serving_programs(loop, config.agent, logs, level=level)


class ProgramPlayer(AgentPlayer):
    """Lets a program play one episode, in place of the pipeline's own loop."""

    def __init__(self, programs: Programs, context: PlayContext, spec: EpisodeSpec) -> None:
        super().__init__(
            context, programs.adapter, spec, gateway=programs.gateway, config=programs.config
        )
        self._programs = programs

    async def _run(self, rollout: Rollout, opening: Opening) -> Status:
        programs, episode = self._programs, self._episode
        # Files and output of a program may contain its key.
        programs.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = programs.folder / secrets.token_hex(4)
        try:
            program = make_program(
                programs.config,
                Address(url=programs.gateway.url, key=rollout.key),
                programs.sandbox.paths(folder),
                folder=folder,
                prompt="\n\n".join(message["content"] for message in opening.messages),
                task=json.dumps(self._task(opening)),
            )
            process = await programs.sandbox.start(program)
        except ProgramStartError as error:
            episode.error = f"the program was not started: {error}"
            return Status.PROGRAM_FAILED
        steps, gate = rollout.steps, programs.gateway.gate
        rollout.calls.settle = partial(
            wait_until_settled,
            process.pid,
            lambda: steps.num_running > 0 or gate.is_receiving(rollout.key),
        )
        try:
            limit = await _watch(process, programs.config, rollout, program.output)
        finally:
            await process.stopped(programs.config.grace_s)
            episode.output = await asyncio.to_thread(take_output, program.output, rollout.key)
            verdict = None
            if programs.config.reward_from == "harbor":
                verdict = await asyncio.to_thread(take_verdict, results_folder(folder))
        if verdict is not None and verdict.reward is not None:
            steps.report(verdict.reward, verdict.numbers)
        await self._conclude(rollout)
        if limit is None:
            episode.exit_code = process.returncode
            limit = self._program_status(rollout, process.returncode)
        return self._judged(limit, verdict)

    def _judged(self, status: Status, verdict: TrialResult | None) -> Status:
        """Return the status of an episode; where a verdict is due, it counts only with one."""
        if verdict is None or verdict.reward is not None:
            return status
        if status.is_failure:
            self._episode.error = f"{self._episode.error}; {verdict.problem}"
            return status
        self._episode.error = f"no reward, after status {status}: {verdict.problem}"
        return Status.NO_REWARD

    def _program_status(self, rollout: Rollout, exit_code: int | None) -> Status:
        """Return how a program that ended by itself has ended."""
        if exit_code in self._programs.config.exit_codes:
            return self._status(rollout)
        signal = (exit_code or SIGNALS) - SIGNALS
        how = f"ended by signal {signal}" if signal > 0 else f"exit code {exit_code}"
        last = self._episode.output.strip()[-MAX_ERROR_LENGTH:]
        self._episode.error = f"the program failed: {how}; the end of its output: {last!r}"
        is_process = self._programs.config.sandbox.is_this_machine
        if is_process and not rollout.calls.answered:  # Perhaps it lacks what it needs to start.
            note = names_left_out(child_environment(), last, VARIABLES)
            self._episode.error += f"; {note}" if note else ""
        return Status.PROGRAM_KILLED if signal > 0 else Status.PROGRAM_FAILED


async def _watch(
    process: RunningProgram, config: ProgramAgentConfig, rollout: Rollout, output: Path
) -> Status | None:
    """Return when the program has ended or must be stopped, with the limit that it met, if any.

    The time that it waits for the model does not count: that depends on the other programs.
    """
    begun_s, max_bytes = time.monotonic(), config.max_output_mb * 2**20
    end = asyncio.create_task(process.exited())
    try:
        while not end.done():
            await asyncio.wait([end], timeout=WATCH_S)
            if rollout.calls.failure is not None or rollout.steps.failure is not None:
                return None
            if time.monotonic() - begun_s - rollout.calls.waited_s > config.timeout_s:
                return Status.TIME_LIMIT
            if output.stat().st_size > max_bytes:
                return Status.OUTPUT_LIMIT
    finally:
        end.cancel()
    return None
