"""The story of a run: evaluate, warm start, evaluate, learn by reinforcement, evaluate, report."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from openenv_pipe.assembly import Parts, assembled
from openenv_pipe.config.compose import Composed
from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.evaluate import evaluate
from openenv_pipe.grpo.advantages import step_advantages
from openenv_pipe.grpo.samples import build_sample
from openenv_pipe.learner.checkpoint import save_checkpoint
from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.warm_start import WarmStart
from openenv_pipe.progress import Progress, build_progress
from openenv_pipe.rollout.summary import summarise_groups
from openenv_pipe.runs.episodes import episodes_path, write_episodes
from openenv_pipe.runs.evals import save_report
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import MetricsFile
from openenv_pipe.runs.report import write_report
from openenv_pipe.tasks import build_order
from openenv_pipe.trackers import Tracker, build_tracker
from openenv_pipe.types import Group, Sample


def train(composed: Composed, command: Sequence[str]) -> None:
    """Runs it all in a new run folder. Ctrl-C and SIGTERM save what is there, then end the run."""
    config = composed.config
    if config.engine.type == "scripted":
        raise ConfigError("engine=scripted cannot learn; train with engine=local")
    if config.model.lora.rank == 0 and config.model.dtype == "bfloat16":
        raise ConfigError(
            "model.dtype=bfloat16 with model.lora.rank=0: most updates of full training would be "
            "rounded away; set model.dtype=float32 model.autocast=bfloat16, or a model.lora.rank"
        )
    folder = RunFolder.create(config, overrides=composed.overrides, command=command)
    progress = build_progress()
    progress.note(f"run {folder.record.id} in {folder.path}")
    received: list[int] = []
    try:
        asyncio.run(_train(folder, composed, progress, received))
        folder.finish("finished")
    except BaseException as error:
        _end_early(folder, progress, error)
        if isinstance(error, asyncio.CancelledError) and received:
            raise SystemExit(128 + received[0]) from None
        raise
    progress.close()
    progress.note(f"report: {write_report(folder)}")


async def _train(
    folder: RunFolder, composed: Composed, progress: Progress, received: list[int]
) -> None:
    _stop_on_signals(received, progress)
    async with assembled(composed.config, folder.logs) as parts:
        folder.update(num_parameters=parts.policy.num_parameters, device=str(parts.policy.device))
        folder.update(**parts.host.facts())
        training = _Training(parts, folder, progress)
        try:
            await training.run()
        finally:
            await to_the_end(training.close())


def _stop_on_signals(received: list[int], progress: Progress) -> None:
    """SIGINT or SIGTERM cancels the current task; a second one ends the process as it stands.

    That loses the step at hand and nothing else: files are written whole or not at all, and
    guardians end the servers.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop(number: int) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        progress.note("stopping and saving; once more to give up at once")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)


def _end_early(folder: RunFolder, progress: Progress, error: BaseException) -> None:
    """Leaves a folder that says why, and tells a person where to look."""
    interrupted = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
    cause = "interrupted" if interrupted else f"{type(error).__name__}: {error}"
    progress.close()
    with contextlib.suppress(OSError, PipeError):  # a full disk must not hide the error itself
        folder.finish("interrupted" if interrupted else "failed", cause=cause)
        progress.note(f"{cause.splitlines()[0]}; what is there: {write_report(folder)}")


class _Training:
    """The stages, in order. Everything that a run writes is written from here."""

    def __init__(self, parts: Parts, folder: RunFolder, progress: Progress) -> None:
        self._parts = parts
        self._config = parts.config
        self._folder = folder
        self._progress = progress
        self._metrics = MetricsFile(folder.metrics_path)
        self._tracker: Tracker = build_tracker(self._config.tracker, folder.path)
        self._tasks = build_order(
            self._config.env.tasks.order, parts.tasks.train, self._config.seed
        )
        self._learner: Learner | None = None
        self._steps_done: int | None = None  # of GRPO; None: no weights have changed yet
        self._warm_start_steps_done = 0
        self._in_step = False  # weights are between two steps: not to be saved

    async def run(self) -> None:
        await self._evaluate("start")
        if self._config.trainer.warm_start.steps:
            await self._warm_start()
            await self._evaluate("warm_start")
        if self._config.trainer.steps:
            await self._reinforce()
            await self._evaluate("trained")

    async def close(self) -> None:
        """Saves the weights that no checkpoint has yet, and closes the files."""
        try:
            if not self._in_step:
                await self._save_checkpoint()
        finally:
            self._metrics.close()
            self._tracker.close()

    async def _evaluate(self, label: str) -> None:
        report = await evaluate(self._parts, label)
        save_report(self._folder.path, report)
        if report.success is not None:
            self._progress.note(
                f"eval {label}: success {report.success.mean:.1%} "
                f"({report.success.low:.1%}..{report.success.high:.1%})"
            )

    async def _warm_start(self) -> None:
        """Plays the scripted policy's episodes, then imitates them."""
        config, trainer = self._config.trainer.warm_start, self._config.trainer
        assert config.policy is not None
        groups = await self._parts.collect(
            self._tasks.take(0, config.num_episodes),
            group_size=1,
            temperature=1.0,
            label="warm start",
            engine=self._parts.scripted_engine(config.policy),
        )
        await asyncio.to_thread(write_episodes, episodes_path(self._folder.path, 0), groups)
        samples = [
            build_sample(group.id, episode, [1.0] * len(episode.turns))
            for group in groups
            for episode in group.scored
            if episode.turns
        ]
        stage = WarmStart(
            self._parts.policy,
            config,
            tokens_per_batch=trainer.tokens_per_batch,
            seed=self._config.seed,
        )
        self._steps_done = 0
        self._progress.stage("warm_start", config.steps)
        for step in range(1, config.steps + 1):
            await to_the_end(self._imitate(step, stage, samples))
        await to_the_end(self._save_checkpoint())

    async def _imitate(self, step: int, stage: WarmStart, samples: Sequence[Sample]) -> None:
        started = time.perf_counter()
        self._in_step = True
        metrics = await self._parts.compute(stage.step, samples)
        self._warm_start_steps_done = step
        self._in_step = False
        self._log("warm_start", step, metrics, started)

    async def _reinforce(self) -> None:
        """GRPO: collect groups, turn rewards into advantages, update, publish."""
        trainer = self._config.trainer
        self._learner = Learner(
            self._parts.policy,
            trainer,
            max_episode_tokens=self._config.env.max_episode_tokens,
            seed=self._config.seed,
        )
        self._progress.stage("grpo", trainer.steps)
        for step in range(1, trainer.steps + 1):
            started = time.perf_counter()
            groups = await self._parts.collect(
                self._tasks.take((step - 1) * trainer.tasks_per_step, trainer.tasks_per_step),
                group_size=trainer.group_size,
                temperature=trainer.temperature,
                label=f"step {step}",
            )
            await to_the_end(self._learn(step, groups, started))
            if step % trainer.checkpoint_every == 0 or step == trainer.steps:
                await to_the_end(self._save_checkpoint())

    async def _learn(self, step: int, groups: Sequence[Group], started: float) -> None:
        """Updates the policy on the groups and writes down what happened, all or nothing."""
        assert self._learner is not None
        collected = time.perf_counter()
        self._tasks.record(groups)
        advantage = self._config.trainer.advantage
        advantages = step_advantages(
            groups,
            baseline=advantage.baseline,
            scale=advantage.scale,
            discount=advantage.discount,
        )
        await asyncio.to_thread(
            write_episodes, episodes_path(self._folder.path, step), groups, advantages
        )
        metrics = summarise_groups(groups)
        metrics["groups/trained"] = sum(values is not None for values in advantages)
        metrics["groups/skipped"] = sum(values is None for values in advantages)
        samples = _build_samples(groups, advantages)
        self._in_step = True
        if samples:
            metrics |= await self._parts.compute(self._learner.update, samples, step)
            self._parts.engine.publish(step)
        self._steps_done = step
        self._in_step = False
        ended = time.perf_counter()
        metrics["time/rollout_s"] = collected - started
        metrics["time/learner_s"] = ended - collected
        metrics["time/tokens_per_s"] = metrics["tokens/sampled"] / (ended - started)
        self._log("grpo", step, metrics, started)

    def _log(self, stage: str, step: int, metrics: Mapping[str, Any], started: float) -> None:
        record = {
            "step": step,
            "stage": stage,
            **metrics,
            "time/step_s": time.perf_counter() - started,
        }
        self._metrics.append(record)
        self._tracker.log(record)
        self._progress.advance(record)

    async def _save_checkpoint(self) -> None:
        """The policy as it is after the last whole step, unless it is saved already."""
        step = self._steps_done
        if step is None or self._folder.checkpoint_path(step).exists():
            return
        await self._parts.compute(self._write_checkpoint, step)

    def _write_checkpoint(self, step: int) -> None:
        optimizer = self._learner.optimizer if self._learner is not None else None
        with self._folder.new_checkpoint(step) as path:
            save_checkpoint(
                path,
                self._parts.policy,
                optimizer,
                steps=step,
                warm_start_steps=self._warm_start_steps_done,
            )


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Awaits work that must not stop halfway: a cancellation is kept back until it is done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _build_samples(
    groups: Sequence[Group], advantages: Sequence[Mapping[int, list[float]] | None]
) -> list[Sample]:
    """The samples of groups that have a signal; episodes over before their first turn have none."""
    return [
        build_sample(group.id, episode, by_member[episode.member])
        for group, by_member in zip(groups, advantages, strict=True)
        if by_member is not None
        for episode in group.scored
        if episode.turns
    ]
