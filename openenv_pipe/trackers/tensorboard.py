"""Metrics as TensorBoard scalars. Imports torch, so it is imported only when it is asked for."""

from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.extras import how_to_install


def load_writer() -> type:
    """Import TensorBoard's SummaryWriter. Raises ConfigError if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "tracker.type=tensorboard needs the tensorboard package, which is not installed; "
            f"{how_to_install('tensorboard')}, or set tracker.type=none"
        ) from error
    return SummaryWriter


class TensorboardTracker:
    """Event files in one folder; tags are `stage/key`, because each stage counts its own steps."""

    def __init__(self, folder: Path) -> None:
        self._writer = load_writer()(str(folder))

    def log(self, record: Mapping[str, Any]) -> None:
        """Write all numbers of a record but its step."""
        for key, value in record.items():
            if isinstance(value, Real) and key != "step":
                self._writer.add_scalar(f"{record['stage']}/{key}", value, record["step"])

    def close(self) -> None:
        self._writer.close()
