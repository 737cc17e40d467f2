"""The keys of the trackers."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from openenv_pipe.config.schema.base import (
    Block,
    Count,
    HeaderName,
    HeaderValue,
    PositiveCount,
    Seconds,
    ServerUrl,
    Share,
    Text,
    VariableName,
)
from openenv_pipe.config.schema.tracker import TrackerBlock


class TensorboardTrackerConfig(TrackerBlock):
    """TensorBoard event files in the run folder."""

    type: Literal["tensorboard"]


class EpisodeTableConfig(TrackerBlock):
    """Base of the trackers that show tables of episodes."""

    episodes_every: PositiveCount = Field(description="steps of GRPO from one table to the next")
    episodes_per_table: Count = Field(
        description="episodes in a table, half of them the worst and half the best; 0: no tables"
    )


class WandbTrackerConfig(EpisodeTableConfig):
    """A run of Weights & Biases. The key is taken from WANDB_API_KEY, or from `wandb login`."""

    type: Literal["wandb"]
    mode: Literal["online", "offline"] = Field(
        description="offline: files in the run folder, which `wandb sync` uploads later"
    )
    project: Text
    entity: Text | None = Field(description="a user or team; null: the user's default")
    tags: list[str]


class MlflowTrackerConfig(EpisodeTableConfig):
    """A run of MLflow. Credentials are taken from the variables MLFLOW_TRACKING_*."""

    type: Literal["mlflow"]
    uri: str = Field(
        description="sqlite:/// and the path of a file, or the http(s) address of a server"
    )
    experiment: Text


class TrackioTrackerConfig(EpisodeTableConfig):
    """A run of Trackio, in the local folder TRACKIO_DIR; `trackio show` shows it."""

    type: Literal["trackio"]
    project: Text


class CredentialsConfig(Block):
    """A header whose value is made of environment variables, never of the configuration."""

    header: HeaderName
    scheme: Literal["plain", "bearer", "basic"] = Field(
        description="plain: the value alone; bearer: behind `Bearer`; basic: user and password"
    )
    variables: Annotated[list[VariableName], Field(min_length=1, max_length=2)] = Field(
        description="the variable with the key; for basic, those with the user and the password"
    )

    @model_validator(mode="after")
    def _has_its_variables(self) -> Self:
        if len(self.variables) != (2 if self.scheme == "basic" else 1):
            raise ValueError(
                f"scheme={self.scheme} with variables={self.variables}: basic needs 2 variables, "
                "with the user and the password, and each other scheme 1"
            )
        return self


class OtlpTrackerConfig(TrackerBlock):
    """Episodes as OpenTelemetry traces, sent by OTLP over HTTP."""

    type: Literal["otlp"]
    endpoint: ServerUrl = Field(description="where traces are posted to, as .../v1/traces")
    headers: dict[HeaderName, HeaderValue] = Field(description="HTTP headers; no secrets")
    credentials: CredentialsConfig | None
    sample_rate: Share = Field(description="fraction of the episodes that are sent")
    max_per_step: PositiveCount = Field(
        description="episodes of one step, or of one evaluation, that are sent at most"
    )
    timeout_s: Seconds = Field(description="for one request, with its repetitions")
