"""Take a few training steps in a folder of their own; say where the time goes, and why."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from openenv_pipe.config.compose import Composed
from openenv_pipe.config.rules.engine import vllm_engine
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import ConfigError, FailureError
from openenv_pipe.extras.profile.recorder import (
    CHECKPOINT,
    ENVIRONMENT,
    FILES,
    MEANINGS,
    PUBLISHING,
    PYTHON,
    REWARDS,
    SAMPLING,
    UPDATE,
    Moment,
    Recorder,
)
from openenv_pipe.pipeline.preparation import prepare
from openenv_pipe.pipeline.requirements import check_requirements
from openenv_pipe.pipeline.run import Attempt, RunControl, play_and_learn
from openenv_pipe.reports.alarm import mean_of
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.run import Run
from openenv_pipe.system.files import temporary_folder
from openenv_pipe.system.process import usable_cores
from openenv_pipe.system.tables import Column, Fit, Table

FIRST = 1  # steps that are not measured: the first one warms up caches
LARGE = 0.2  # fraction of the measured time from which on a wait is worth a change
NOTABLE = 0.1  # the same for publishing and checkpoints
LOW_MFU = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """How long an activity lasted, as fractions of the measured time."""

    total: float  # at the same time as other activities, or alone
    alone: float


@dataclass(frozen=True, kw_only=True)
class Profiled:
    config: RunConfig
    steps: Sequence[Mapping[str, Any]]  # their lines of metrics.jsonl
    moments: Sequence[Moment]
    ended_s: float  # of time.perf_counter, as in the moments

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.moments[0].at_s

    @cached_property
    def shares(self) -> dict[str, Share]:
        total: dict[str, float] = {}
        alone: dict[str, float] = {}
        for moment, lasts_s in self.lasting():
            for label in moment.labels:
                total[label] = total.get(label, 0.0) + lasts_s
            if len(moment.labels) == 1:
                (label,) = moment.labels
                alone[label] = alone.get(label, 0.0) + lasts_s
        return {
            label: Share(
                total=total[label] / self.duration_s, alone=alone.get(label, 0.0) / self.duration_s
            )
            for label in sorted(total, key=lambda label: -total[label])
        }

    @property
    def nothing(self) -> float:
        """The fraction of the measured time without any activity."""
        idle_s = sum(lasts_s for moment, lasts_s in self.lasting() if not moment.labels)
        return idle_s / self.duration_s

    def threads_of(self, label: str) -> float:
        counts = [
            sum(found == label for found in moment.working.values()) for moment in self.moments
        ]
        busy = [count for count in counts if count]
        return sum(busy) / len(busy) if busy else 0.0

    def mean(self, metric: str) -> float:
        return mean_of(self.steps, metric) or 0.0

    def lasting(self) -> Iterator[tuple[Moment, float]]:
        ends = [*(moment.at_s for moment in self.moments[1:]), self.ended_s]
        for moment, end_s in zip(self.moments, ends, strict=True):
            yield moment, end_s - moment.at_s


def profile(
    composed: Composed, num_steps: int, command: Sequence[str], control: RunControl
) -> Profiled:
    """Train as configured, without evaluations and trackers, and record `num_steps` steps of GRPO.

    The steps before them, the warm start and one step of GRPO, are not measured. Fewer steps are
    measured if `trainer.steps` is lower. Raises ConfigError and FailureError.
    """
    config = composed.config
    if config.trainer.steps <= FIRST:
        raise ConfigError(
            f"trainer.steps={config.trainer.steps} leaves no step to measure, because the first "
            f"one is not measured; set trainer.steps={FIRST + num_steps}"
        )
    with control.progress.phase("checking what the run needs"):
        check_requirements(config)
    control.stop.run(prepare(config, control.progress.note))
    with temporary_folder(Path(config.runs_dir), ".profile_") as folder:
        assert folder is not None  # a requirement that has been checked
        update = {"runs_dir": str(folder), "tracker": {}}
        config = config.model_copy(update=update)
        run_folder = RunFolder.create(config, overrides=composed.overrides, command=command)
        config = run_folder.with_template_time(config)
        attempt = Attempt(folder=run_folder, config=config, stop_after=FIRST + num_steps)
        recorder = Recorder()
        try:
            with run_folder.held():
                steps = control.stop.run(_train(attempt, control, recorder))
        except FailureError as error:  # its log is about to be removed; the message has its end
            raise FailureError(str(error).replace(f" (log: {error.log})", "")) from error
        finally:
            control.progress.close()
    return Profiled(
        config=composed.config,
        steps=steps,
        moments=recorder.moments,
        ended_s=recorder.ended_s,
    )


async def _train(
    attempt: Attempt, control: RunControl, recorder: Recorder
) -> list[Mapping[str, Any]]:
    """Train, and record from the end of the first step to the end of the last.

    Returns the metrics of the steps that are measured.
    """
    loop, steps = asyncio.get_running_loop(), list[Mapping[str, Any]]()
    assert attempt.stop_after is not None
    last = min(attempt.stop_after, attempt.config.trainer.steps)

    def on_step(run: Run, metrics: Mapping[str, Any]) -> None:
        if metrics["stage"] != "grpo":
            return
        if metrics["step"] > FIRST:
            steps.append(metrics)
        if metrics["step"] == FIRST:
            recorder.start(loop)
        elif metrics["step"] == last:
            recorder.stop()

    callbacks = [*control.callbacks, on_step]
    try:
        await play_and_learn(attempt, replace(control, callbacks=callbacks, evaluates=False))
    finally:
        recorder.stop()
    return steps


def as_table(profiled: Profiled) -> Table:
    table = Table(
        Column("activity"),
        Column("s per step", justify="right"),
        Column("of the time", justify="right"),
        Column("alone", justify="right"),
        Column("", drop=1, fit=Fit.FOLD, style="dim"),
    )
    step_s = profiled.duration_s / len(profiled.steps)
    for label, share in profiled.shares.items():
        table.add_row(
            label,
            f"{share.total * step_s:.2f}",
            f"{share.total:.0%}",
            f"{share.alone:.0%}",
            MEANINGS[label],
        )
    nothing = profiled.nothing
    table.add_row(
        "none", f"{nothing * step_s:.2f}", f"{nothing:.0%}", "", "none of these: waits of threads"
    )
    return table


def summary(profiled: Profiled) -> str:
    num_steps = len(profiled.steps)
    parts = [
        f"{num_steps} step{'s' * (num_steps > 1)} after the first",
        f"{profiled.duration_s / num_steps:.2f} s each",
        f"{profiled.mean('time/tokens_per_s'):.0f} sampled tokens/s",
    ]
    if computed := profiled.mean("time/learner_tokens_per_s"):
        mfu = profiled.mean("time/mfu")
        parts.append(f"{computed:.0f} tokens/s in the update ({mfu:.0%} of the matrix rate)")
    return ", ".join(parts)


def advice(profiled: Profiled) -> list[str]:
    """Return one sentence for each cause that was found, the most promising first."""
    found = [find(profiled) for find in CAUSES]
    return [text for text in found if text is not None]


def _sessions(profiled: Profiled) -> str | None:
    config, num_episodes = profiled.config, profiled.config.trainer.episodes_per_step
    host = config.host
    if host.type == "python" or not host.has_environment or host.capacity >= num_episodes:
        return None
    return (
        f"only {host.capacity} of a step's {num_episodes} episodes are played at once: raise "
        "host.sessions_per_server, if the environment allows it, or host.num_servers"
    )


def _batch(profiled: Profiled) -> str | None:
    num_episodes = profiled.config.trainer.episodes_per_step
    num_sampled = profiled.config.engine.sampled_at_once(num_episodes)
    if num_sampled == 0 or num_sampled >= num_episodes:
        return None
    return (
        f"engine.max_batch={num_sampled} is less than the {num_episodes} episodes of a step, "
        "so some wait for others to end: raise it if memory allows"
    )


def _environment(profiled: Profiled) -> str | None:
    share = _share(profiled, ENVIRONMENT).alone
    if share < LARGE:
        return None
    text = (
        f"for {share:.0%} of the time everything waits for the environment: start more servers "
        "(host.num_servers)"
    )
    if not profiled.config.trainer.max_staleness:
        text += ", or let the learner work meanwhile (trainer.max_staleness=1)"
    return text


def _rewards(profiled: Profiled) -> str | None:
    share = _share(profiled, REWARDS).alone
    if share < LARGE:
        return None
    text = f"for {share:.0%} of the time everything waits for rewards"
    if profiled.config.judge.answers:
        text += ": raise judge.max_concurrent"
    if not profiled.config.trainer.max_staleness:
        text += "; trainer.max_staleness=1 lets the learner work meanwhile"
    return text


def _overlap(profiled: Profiled) -> str | None:
    config, share = profiled.config, _share(profiled, UPDATE).total
    if vllm_engine(config) is None or config.trainer.max_staleness or share < LARGE:
        return None
    return (
        f"for {share:.0%} of the time the learner works and the servers of the engine are idle: "
        "trainer.max_staleness=1 plays the next groups meanwhile"
    )


def _idle_cores(profiled: Profiled) -> str | None:
    config = profiled.config
    threads = {thread for moment in profiled.moments for thread in moment.working}
    if not any(thread.startswith("sampler") for thread in threads):
        return None  # The model's own modules use all cores in one thread.
    has_cores = (config.num_threads or len(usable_cores())) > 1
    if (
        not has_cores
        or profiled.threads_of(SAMPLING) >= 1.2
        or _share(profiled, SAMPLING).total < LARGE
    ):
        return None
    return (
        "the engine samples on one core, because a step's "
        f"{config.trainer.episodes_per_step} episodes are one batch: more of them "
        "(trainer.tasks_per_step, trainer.group_size) take less time each"
    )


def _no_update(profiled: Profiled) -> str | None:
    if UPDATE in profiled.shares:
        return None
    return (
        "nothing was trained, because no group of these steps had a signal: measure a model that "
        "earns some reward, for example after the whole warm start (trainer.warm_start.steps)"
    )


def _batches(profiled: Profiled) -> str | None:
    mfu, share = profiled.mean("time/mfu"), _share(profiled, UPDATE).total
    if not mfu or mfu >= LOW_MFU or share < LARGE:
        return None
    config = profiled.config
    wishes = ["raise trainer.tokens_per_batch"]
    if config.model.activation_checkpointing:
        wishes.append("set model.activation_checkpointing=false")
    if config.model.autocast == "float32":
        wishes.append("set model.autocast=bfloat16")
    return (
        f"the update reaches {mfu:.0%} of this machine's matrix rate and takes {share:.0%} of the "
        f"time: if memory allows, {', or '.join(wishes)}"
    )


def _publishing(profiled: Profiled) -> str | None:
    share, config = _share(profiled, PUBLISHING).total, profiled.config
    if share < NOTABLE:
        return None
    text = f"publishing weights takes {share:.0%} of the time"
    if (engine := vllm_engine(config)) is None:
        return text
    if config.model.lora.rank == 0:
        text += ": an adapter (model.lora.rank=16) is much smaller than all weights"
        if engine.weight_transfer == "files":
            text += ", and engine.weight_transfer=broadcast writes no files"
    return text


def _saving(profiled: Profiled) -> str | None:
    share = _share(profiled, CHECKPOINT).total
    if share < NOTABLE:
        return None
    every = profiled.config.trainer.checkpoint.every
    return f"checkpoints take {share:.0%} of the time: raise trainer.checkpoint.every (now {every})"


def _python(profiled: Profiled) -> str | None:
    share = _share(profiled, PYTHON).alone + _share(profiled, FILES).alone
    if share < LARGE:
        return None
    return (
        f"for {share:.0%} of the time only Python code runs, which py-spy shows; templates and "
        "patterns of env.adapter are the usual cause"
    )


CAUSES: tuple[Callable[[Profiled], str | None], ...] = (
    *(_no_update, _sessions, _batch, _environment, _rewards, _overlap, _idle_cores),
    *(_batches, _publishing, _saving, _python),
)


def _share(profiled: Profiled, label: str) -> Share:
    return profiled.shares.get(label, Share(total=0.0, alone=0.0))
