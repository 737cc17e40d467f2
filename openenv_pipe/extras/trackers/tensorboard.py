"""Metrics as TensorBoard scalars. Imports torch, so it is imported only when it is asked for."""

import json
from collections.abc import Mapping
from pathlib import Path

from openenv_pipe.extras.trackers.schema import TensorboardTrackerConfig
from openenv_pipe.runs.record import EndStatus
from openenv_pipe.system.optional_packages import needed_by
from openenv_pipe.system.untrusted_text import code_block
from openenv_pipe.trackers.base import Opened, TrackedEvaluation, TrackedRun, TrackedStep


class TensorboardTracker:
    """Event files in one folder, which a resumed run writes again; tags are `stage/key`."""

    def __init__(self, key: str, config: TensorboardTrackerConfig, folder: Path) -> None:
        with needed_by("tracker=tensorboard", "tensorboard", ", or set tracker=none"):
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def open(self, run: TrackedRun) -> Opened:
        self._writer.add_text("config", code_block(json.dumps(run.config, indent=2)))
        if run.parent is not None:
            self._writer.add_text(run.parent.kind, code_block(f"{run.parent.id} {run.parent.path}"))
        return Opened(run_id=None)

    def log(self, step: TrackedStep) -> None:
        for name, value in step.numbers.items():
            self._writer.add_scalar(name, value, step.record["step"])

    def log_evaluation(self, evaluation: TrackedEvaluation) -> None:
        for name, value in evaluation.numbers.items():
            self._writer.add_scalar(name, value, evaluation.step)

    def close(self, status: EndStatus, summary: Mapping[str, float]) -> None:
        self._writer.add_text("status", status)
        for name, value in summary.items():
            self._writer.add_scalar(f"summary/{name}", value, 0)
        self._writer.close()
