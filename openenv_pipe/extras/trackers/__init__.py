"""Trackers for the tools that people use.

schema           the keys of their blocks
tensorboard, wandb, mlflow, trackio   metrics, with tables of episodes (episode_table)
otlp             episodes as traces (episode_trace), and their rewards as scores (langfuse_scores)
"""

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
