"""Advice: which keys to change, by what a profile shows. Each function looks for one cause."""

from collections.abc import Callable

from openenv_pipe.config.rules.engine import vllm_engine
from openenv_pipe.extras.profile.command import Profiled
from openenv_pipe.extras.profile.recorder import (
    CHECKPOINT,
    ENVIRONMENT,
    FILES,
    PUBLISHING,
    PYTHON,
    REWARDS,
    SAMPLING,
    UPDATE,
)
from openenv_pipe.system.process import usable_cores

LARGE = 0.2  # of the measured time, from which a wait is worth a change
NOTABLE = 0.1  # the same of publishing, checkpoints and files
LOW_MFU = 0.15


def advice(profiled: Profiled) -> list[str]:
    """Return one sentence for each cause that was found, the most promising first."""
    found = [find(profiled) for find in CAUSES]
    return [text for text in found if text is not None]


def _sessions(profiled: Profiled) -> str | None:
    config, num_episodes = profiled.config, _num_episodes(profiled)
    host = config.host
    if host.type == "python" or not host.has_environment:
        return None
    if host.capacity >= num_episodes:
        return None
    return (
        f"only {host.capacity} of a step's {num_episodes} episodes are played at once: raise "
        "host.sessions_per_server, if the environment allows it, or host.num_servers"
    )


def _batch(profiled: Profiled) -> str | None:
    num_episodes = _num_episodes(profiled)
    num_sampled = profiled.config.engine.sampled_at_once(num_episodes)
    if num_sampled == 0 or num_sampled >= num_episodes:
        return None
    return (
        f"engine.max_batch={num_sampled} is less than the {num_episodes} episodes of a step, "
        "so some wait for others to end: raise it if memory allows"
    )


def _environment(profiled: Profiled) -> str | None:
    share = _alone(profiled, ENVIRONMENT)
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
    share = _alone(profiled, REWARDS)
    if share < LARGE:
        return None
    text = f"for {share:.0%} of the time everything waits for rewards"
    if profiled.config.judge.answers:
        text += ": raise judge.max_concurrent"
    if not profiled.config.trainer.max_staleness:
        text += "; trainer.max_staleness=1 lets the learner work meanwhile"
    return text


def _overlap(profiled: Profiled) -> str | None:
    config, share = profiled.config, _total(profiled, UPDATE)
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
    if not has_cores or profiled.threads_of(SAMPLING) >= 1.2 or _total(profiled, SAMPLING) < LARGE:
        return None
    return (
        f"the engine samples on one core, because a step's {_num_episodes(profiled)} episodes are "
        "one batch: more of them (trainer.tasks_per_step, trainer.group_size) take less time each"
    )


def _no_update(profiled: Profiled) -> str | None:
    if UPDATE in profiled.shares:
        return None
    return (
        "nothing was trained, because no group of these steps had a signal: measure a model that "
        "earns some reward, for example after the whole warm start (trainer.warm_start.steps)"
    )


def _batches(profiled: Profiled) -> str | None:
    mfu, share = profiled.mean("time/mfu"), _total(profiled, UPDATE)
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
    share, config = _total(profiled, PUBLISHING), profiled.config
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
    share = _total(profiled, CHECKPOINT)
    if share < NOTABLE:
        return None
    every = profiled.config.trainer.checkpoint.every
    return f"checkpoints take {share:.0%} of the time: raise trainer.checkpoint.every (now {every})"


def _python(profiled: Profiled) -> str | None:
    share = _alone(profiled, PYTHON) + _alone(profiled, FILES)
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


def _num_episodes(profiled: Profiled) -> int:
    trainer = profiled.config.trainer
    return trainer.tasks_per_step * trainer.group_size


def _total(profiled: Profiled, label: str) -> float:
    share = profiled.shares.get(label)
    return share.total if share else 0.0


def _alone(profiled: Profiled, label: str) -> float:
    share = profiled.shares.get(label)
    return share.alone if share else 0.0
