"""What a run needs, tried in the order in which it would meet the problems.

Each check yields lines; an error meant for people becomes a failed line, and the next check goes
on. Nothing is loaded onto a GPU, nothing is downloaded.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from openenv_pipe.commands.findings import Line, Result, failed
from openenv_pipe.commands.preflight.environment import check_environment, policy_path
from openenv_pipe.commands.preflight.model import check_model
from openenv_pipe.config.schema import (
    PythonAdvantageConfig,
    PythonEngineConfig,
    PythonLossConfig,
    PythonTarget,
    RunConfig,
    TrackerConfig,
)
from openenv_pipe.engines.vllm.check import check_engine
from openenv_pipe.engines.vllm.install import find_build
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.errors import PipeError
from openenv_pipe.rewards import Scorer
from openenv_pipe.system.python_targets import bind_function
from openenv_pipe.system.resources import load_callable
from openenv_pipe.trackers import build_tracker


def run_checks(config: RunConfig) -> list[Line]:
    """All checks."""
    lines: list[Line] = []
    for name, check in CHECKS.items():
        try:
            lines.extend(check(config))
        except PipeError as error:
            lines.append(failed(name, error))
    return lines


def _check_code(config: RunConfig) -> Iterator[Line]:
    build_adapter(config.env.adapter)
    yield Line("adapter", Result.OK, f"{config.env.adapter.type}: templates and pattern are valid")
    Scorer(config.reward, config.env.success_reward)
    yield Line("rewards", Result.OK, f"terms: {', '.join(config.reward.terms)}")
    if (dotted := policy_path(config)) is not None:
        load_callable(dotted)
        yield Line("policy", Result.OK, dotted)
    for dotted in config.env.baselines.values() if config.eval.baselines else ():
        load_callable(dotted)
    if isinstance(config.trainer.advantage, PythonAdvantageConfig):
        bind_function("trainer.advantage", config.trainer.advantage, 1)
        yield Line("advantage", Result.OK, config.trainer.advantage.target)
    if isinstance(config.trainer.loss, PythonLossConfig):
        from openenv_pipe.learner.objective import Objective  # brings torch

        Objective(config.trainer.loss)
        yield Line("loss", Result.OK, config.trainer.loss.target)
    yield from _check_tracker(config.tracker)


def _check_tracker(config: TrackerConfig) -> Iterator[Line]:
    """Build the tracker once, for a folder that is removed again."""
    if config.type == "none":
        return
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-check-") as folder:
        build_tracker(config, Path(folder)).close()
    name = config.target if isinstance(config, PythonTarget) else config.type
    yield Line("tracker", Result.OK, name)


def _check_engine(config: RunConfig) -> Iterator[Line]:
    if isinstance(config.engine, PythonEngineConfig):
        capabilities = config.engine.capabilities
        purpose = "training" if capabilities.can_train else "evaluation"
        yield Line("engine", Result.OK, f"{config.engine.target}, for {purpose}")
    if config.engine.type == "vllm":
        build = "cpu" if config.device == "cpu" else find_build()
        found = check_engine(config.engine, build, config.model.lora.rank)
        yield Line("engine", Result.OK, found)


CHECKS: dict[str, Callable[[RunConfig], Iterator[Line]]] = {
    "code": _check_code,
    "environment": check_environment,
    "model": check_model,
    "engine": _check_engine,
}
