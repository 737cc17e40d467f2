"""GRPO as a stage of a run: play groups, compute advantages, update the policy."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from openenv_pipe.algorithms.advantages import GroupAdvantages, gdpo_advantages, step_advantages
from openenv_pipe.algorithms.custom_advantages import UserAdvantages
from openenv_pipe.algorithms.losses.normalization import Uncomputed
from openenv_pipe.algorithms.samples import build_samples, count_uncomputed, few_samples
from openenv_pipe.config.schema import (
    AdvantageConfig,
    LossConfig,
    PythonAdvantageConfig,
    RewardConfig,
)
from openenv_pipe.errors import RunFolderError
from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.seeding import seed_step
from openenv_pipe.pipeline.hints import add_hints
from openenv_pipe.pipeline.metrics_log import finish_despite_cancel
from openenv_pipe.pipeline.served_teacher import ServedTeacher, served_teachers
from openenv_pipe.pipeline.stage import StageContext
from openenv_pipe.registry import extras, load
from openenv_pipe.reports.alarms import check_mismatch
from openenv_pipe.rewards.reported_numbers import summarise_reported
from openenv_pipe.rollout.metrics import (
    count_unlike_prompts,
    summarise_environment,
    summarise_groups,
    summarise_signal,
    summarise_skipped,
    summarise_staleness,
)
from openenv_pipe.runs.checkpoints import StageStep
from openenv_pipe.runs.episodes import (
    episodes_path,
    first_episodes_path,
    read_episodes,
    write_episodes,
)
from openenv_pipe.runs.metrics import ENVIRONMENT
from openenv_pipe.runs.trained_tokens import tokens_path, write_trained_tokens
from openenv_pipe.system.progress import long_phase
from openenv_pipe.types import Group, Sample

RATE_AFTER_COLLAPSE = 1.0 / 3.0
MEASURE_EVERY = 5  # steps between measurements of `kl/start`
MEASURED_TOKENS = 2048  # sampled in the first step, on which `kl/start` is measured
MAX_RETURNS = 3  # to the best checkpoint, by trainer.guard=back


class GrpoStage:
    """Runs the steps of GRPO and counts them."""

    _learner: Learner  # built by `run`, from the weights after the warm start
    _teachers: list[ServedTeacher]  # found by `run`

    def __init__(self, context: StageContext, stop_after: int | None) -> None:
        """stop_after: the step to stop after; None: the last that the configuration asks for."""
        self.stop_reason: str | None = None  # why training ended before its last step
        self._step = 0
        self._has_warned = False
        self._is_first_step = True  # of this attempt
        self._start: list[Sample] | None = None  # of the first step, once they are needed
        self._in_step = False  # True while a step changes the weights, which cannot be saved then
        self._context = context
        self._config = context.components.config
        self._trainer = self._config.trainer
        last = self._trainer.steps
        self._last_step = last if stop_after is None else min(last, stop_after)
        self._advantages = {
            name: build_advantages(each.trainer.advantage, each.reward)
            for name, each in self._config.environments.items()
        }

    def is_done(self, at: StageStep | None) -> bool:
        is_stopped_before = at is not None and at.stage == "warm_start"
        return self._trainer.steps == 0 or is_stopped_before

    async def run(self, at: StageStep | None, checkpoint: Path | None) -> StageStep:
        context = self._context
        components, evaluator = context.components, context.evaluator
        context.progress.stage("grpo", self._last_step)
        assert components.policy is not None
        self._learner = await components.compute(components.devices.learner, components.policy)
        if checkpoint and StageStep.of(checkpoint).stage == "grpo":
            await components.compute(self._load, checkpoint)
        await components.compute(context.saver.tidy)  # A resume may have set the best aside.
        self._set_rate()
        self._teachers = await served_teachers(self._config, components.policy.tokenizer)
        evaluations = self._config.eval.during
        while self._step < self._last_step:
            self.stop_reason = self._why_stopped() or await evaluator.during(self._step)
            if self.stop_reason is not None:
                break
            if evaluations.every and self._step % evaluations.every == 0:
                await finish_despite_cancel(self._save_if_best())
            if context.saver.is_overdue():
                await finish_despite_cancel(self.save_unsaved())
            started = time.perf_counter()
            seed_step(self._config.seed, "grpo", self._step + 1)
            groups = await self._play()
            await finish_despite_cancel(self._learn(groups, started))
            if self._is_due():
                await finish_despite_cancel(self._save())
            self.stop_reason = await context.metrics_log.call_back()
            if self.stop_reason is not None:
                break
        if self._step == self._trainer.steps and self._trainer.checkpoint.best_by_evaluations:
            await evaluator.during(self._step)  # the last checkpoint may be the best, too
        if self._step and not self._is_saved():  # The last step's weights are always saved.
            await finish_despite_cancel(self._save())
        at = StageStep("grpo", self._step)
        await components.compute(context.saver.keep_last, at)
        await components.compute(context.saver.tidy)
        return at

    async def _play(self) -> list[Group]:
        """Return the groups of the next step; report the episodes of an attempt's first step.

        After that step, the progress shows the time that is left.
        """
        step, is_first = self._step + 1, self._is_first_step
        self._is_first_step = False
        if not is_first:
            return await self._context.source.groups(step)
        text = f"collecting the episodes of step {step}"
        async with long_phase(self._context.progress, text) as count:
            return await self._context.source.groups(step, count)

    def _why_stopped(self) -> str | None:
        """Return why training ends, if the policy has collapsed and `trainer.guard` asks for it.

        This follows from the steps' metrics alone, so a killed run does the same when it resumes.
        """
        alarms, guard = self._context.metrics_log.alarms, self._trainer.guard
        if alarms.collapse is None or guard == "warn":
            return None
        if guard == "back" and alarms.num_collapses <= MAX_RETURNS and self._best.exists():
            return None
        return f"stopped by trainer.guard={guard} after step {self._step}: {alarms.collapse.what}"

    async def _go_back_if_collapsed(self) -> None:
        """Load the best weights with `trainer.guard=back`, if the last step shows a collapse.

        This is a part of the step, so its checkpoints have the weights that the run goes on with,
        which the next metrics measure. League members of later weights than the best are dropped,
        and such a reference is replaced.
        """
        context, optimizer = self._context, self._learner.optimizer
        is_collapsed = context.metrics_log.alarms.collapse is not None
        if self._trainer.guard != "back" or not is_collapsed or self._why_stopped():
            return
        self._in_step = True
        num_before = StageStep.of(self._best.resolve()).step
        await context.source.go_back(num_before)
        await context.source.begin_update()
        await context.components.compute(context.saver.load_weights, self._best)
        every, policy = self._trainer.loss.kl.refresh_every, context.components.policy
        is_later = every is not None and num_before < (self._step - 1) // every * every
        if is_later and policy is not None and policy.reference is not None:
            await context.components.compute(policy.keep_reference)
        optimizer.forget()
        self._set_rate()
        await context.source.publish(self._step)
        self._in_step = False
        context.progress.note(
            f"going back to {self._best.resolve().name}, with a learning rate of {optimizer.lr:.3g}"
        )

    def _set_rate(self) -> None:
        """Lower the learning rate for each time that the run has gone back."""
        if self._trainer.guard == "back":
            num_returns = self._context.metrics_log.alarms.num_collapses
            self._learner.optimizer.rate_factor = RATE_AFTER_COLLAPSE**num_returns

    @property
    def _best(self) -> Path:
        return self._context.folder / "checkpoints" / "best"

    async def _save_if_best(self, metrics: Mapping[str, Any] | None = None) -> None:
        save = self._context.saver.save_if_best
        await self._context.components.compute(save, self._step, metrics)

    async def save_unsaved(self) -> None:
        if not self._step or self._in_step or self._is_saved():
            return
        if self._trainer.max_staleness:
            self._context.progress.note("finishing the episodes that are played ahead")
        await self._save(passing=not self._is_due())

    def _load(self, checkpoint: Path) -> None:
        """Load the progress of this stage from a checkpoint. Call it in torch's thread."""
        self._step = StageStep.of(checkpoint).step
        self._context.saver.load_progress(checkpoint, self._learner.optimizer)

    def _is_saved(self) -> bool:
        return self._context.saver.is_saved(StageStep("grpo", self._step))

    def _is_due(self) -> bool:
        is_last = self._step == self._trainer.steps
        return is_last or self._step % self._trainer.checkpoint.every == 0

    async def _save(self, *, passing: bool = False) -> None:
        await self._context.source.settle()
        at, optimizer = StageStep("grpo", self._step), self._learner.optimizer
        save = self._context.saver.save
        await self._context.components.compute(save, at, optimizer, passing=passing)

    async def _learn(self, groups: Sequence[Group], started: float) -> None:
        """Update the policy on the groups, write episodes and metrics, and react to a collapse."""
        collected, context = time.perf_counter(), self._context
        step = self._step + 1
        advantages = await asyncio.to_thread(self._advantages_of, groups)
        if self._trainer.loss.mask_truncated:
            advantages = [each.without_truncated() for each in advantages]
        path = episodes_path(context.folder, step)
        await asyncio.to_thread(write_episodes, path, groups, advantages)
        # It runs during the update: the index is for readers, and training does not need it.
        indexing = asyncio.create_task(asyncio.to_thread(_run_hooks, context.folder, path))
        metrics = summarise_groups(groups) | summarise_staleness(
            groups, version=context.source.version
        )
        self._warn_of_untrained(step, metrics["episodes/untrained"])
        metrics["episodes/masked"] = sum(len(each.masked) for each in advantages)
        metrics |= self._summarise_environments(advantages)
        skipped = [each.group for each in advantages if not each.has_signal]
        metrics |= summarise_signal(len(advantages) - len(skipped), len(advantages), metrics)
        metrics |= summarise_skipped(skipped)
        rollout = context.components.rollout
        if rollout is not None and rollout.chat is not None and rollout.agents is None:
            # Programs and clients write their own prompts.
            metrics["groups/unlike"] = count_unlike_prompts(groups, rollout.chat.reply_text)
        if not metrics.get("staleness/max"):
            await self._save_if_best(metrics)  # the current weights played these groups
        replayed = context.replay.samples(step)
        samples, uncomputed = samples_of_step(
            advantages, self._trainer.loss, is_replaying=bool(replayed)
        )
        metrics |= await asyncio.to_thread(self._add_hints, samples, groups)
        for teacher in self._teachers:
            await teacher.score(samples)
        self._in_step = True
        if samples:
            await context.source.begin_update()
            metrics |= await context.components.compute(
                self._learner.update, samples, step, uncomputed, replayed
            )
            check_mismatch({"step": step, **metrics}, self._trainer.max_mismatch)
            metrics |= await context.components.compute(self._distance_from_start, step)
            await context.source.publish(step)
            tokens = self._learner.trained_tokens
            await asyncio.to_thread(write_trained_tokens, tokens_path(path), samples, tokens)
        context.replay.add(advantages)
        metrics["tokens/skipped"] = metrics["tokens/sampled"] - metrics.get("tokens/trained", 0)
        metrics |= await context.source.metrics()
        await indexing
        context.source.finish(step)
        self._step = step
        self._in_step = False
        ended = time.perf_counter()
        metrics["time/rollout_s"] = collected - started
        metrics["time/learner_s"] = ended - collected
        metrics["time/tokens_per_s"] = metrics["tokens/sampled"] / (ended - started)
        context.metrics_log.write("grpo", step, metrics, started, groups)
        await self._go_back_if_collapsed()

    def _advantages_of(self, groups: Sequence[Group]) -> list[GroupAdvantages]:
        """Compute the advantages of each environment's groups, in the order of the groups."""
        by_group = {
            each.group.id: each
            for env, compute in self._advantages.items()
            if (own := [group for group in groups if group.task.env == env])
            for each in compute(own)
        }
        return [by_group[group.id] for group in groups]

    def _add_hints(self, samples: Sequence[Sample], groups: Sequence[Group]) -> dict[str, float]:
        """Add the hints of `trainer.loss.kl.hint` to the samples; return how many have one."""
        hint, policy = self._trainer.loss.kl.used_hint, self._context.components.policy
        if not samples or hint is None:
            return {}
        assert policy is not None
        add_hints(samples, groups, hint, policy.chat, self._config.max_episode_tokens)
        return {"kl/hinted": fmean(sample.hinted is not None for sample in samples)}

    def _summarise_environments(self, step: Sequence[GroupAdvantages]) -> dict[str, float]:
        """Return the numbers that environments report; with several, also metrics of each."""
        metrics: dict[str, float] = {}
        for name, each in self._config.environments.items():
            own = [given for given in step if given.group.task.env == name]
            groups = [given.group for given in own]
            found = summarise_reported(groups, each.env.metrics)
            if self._config.beside:
                num_signals = sum(given.has_signal for given in own)
                found |= summarise_environment(groups, num_signals)
                prefix = f"{ENVIRONMENT}/{name or each.env.name}"
                found = {f"{prefix}/{key}": value for key, value in found.items()}
            metrics |= found
        return metrics

    def _distance_from_start(self, step: int) -> dict[str, float]:
        """Return `kl/start` every few steps: how far the policy is from that of the first step."""
        # A randomly initialized model has nothing to forget.
        if step % MEASURE_EVERY or self._config.model.type == "tiny":
            return {}
        if self._start is None:
            try:
                groups = read_episodes(first_episodes_path(self._context.folder))
            except RunFolderError as error:
                self._context.progress.note(f"kl/start is not measured any more: {error}")
                groups = []
            self._start = few_samples(groups, MEASURED_TOKENS)
        return {"kl/start": self._learner.kl_from_sampler(self._start)} if self._start else {}

    def _warn_of_untrained(self, step: int, num_untrained: float) -> None:
        """Warn once if episodes of a step have a reward and no trained token."""
        if num_untrained and not self._has_warned:
            self._has_warned = True
            self._context.progress.note(
                f"{num_untrained:g} episodes of step {step} have no token that can be trained, so "
                "nothing is learned from them and no other episode is compared with them: their "
                "prompts leave no room for a reply (env.max_episode_tokens), or all their calls "
                "are retries or auxiliary"
            )


def build_advantages(
    config: AdvantageConfig, reward: RewardConfig
) -> Callable[[Sequence[Group]], list[GroupAdvantages]]:
    """Build the function that computes the advantages of a step's groups.

    Raises ConfigError if a target cannot be used.
    """
    if isinstance(config, PythonAdvantageConfig):
        return UserAdvantages(config)
    if config.scale == "terms":
        weights = {name: reward.terms[name].weight for name in reward.counted}
        return partial(gdpo_advantages, weights=weights)
    return partial(
        step_advantages, baseline=config.baseline, scale=config.scale, discount=config.discount
    )


def samples_of_step(
    advantages: Sequence[GroupAdvantages], loss: LossConfig, *, is_replaying: bool = False
) -> tuple[list[Sample], Uncomputed]:
    """Return the samples to compute, and the other episodes that the loss is a mean over.

    is_replaying: replayed episodes give a signal even if no group does
    """
    no_signal = not any(each.has_signal for each in advantages)
    every_group = not loss.needs_only_advantages or (is_replaying and no_signal)
    if loss.normalise_groups == "with_signal":
        advantages = [each for each in advantages if each.has_signal]
    samples = build_samples(advantages, every_group=every_group)
    return samples, count_uncomputed(advantages, every_group=every_group)


def _run_hooks(folder: Path, file: Path) -> None:
    """Call the hooks of extras for a new file of `episodes/`."""
    for extra in extras():
        if extra.on_episodes:
            load(extra.on_episodes)(folder, file)
