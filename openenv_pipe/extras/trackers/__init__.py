"""Trackers for TensorBoard, Weights & Biases, MLflow, Trackio and OpenTelemetry."""

from openenv_pipe.registry import BlockType, Extra


def _tracker(module: str, name: str) -> BlockType:
    return BlockType(
        block="tracker",
        type=module,
        config=f"openenv_pipe.extras.trackers.schema:{name}Config",
        build=f"openenv_pipe.extras.trackers.{module}:{name}",
    )


EXTRA = Extra(
    name="trackers",
    blocks=(
        _tracker("tensorboard", "TensorboardTracker"),
        _tracker("wandb", "WandbTracker"),
        _tracker("mlflow", "MlflowTracker"),
        _tracker("trackio", "TrackioTracker"),
        _tracker("otlp", "OtlpTracker"),
    ),
)
