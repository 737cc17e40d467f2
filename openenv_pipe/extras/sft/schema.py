"""The keys of `trainer.warm_start.source` of other types than `scripted`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from openenv_pipe.config.schema import OpenAIEngineConfig
from openenv_pipe.config.schema.base import MIN_TEMPERATURE, NumEpisodes, PositiveCount
from openenv_pipe.config.schema.source import SourceBlock


class ConversationsConfig(SourceBlock):
    """Conversations of a file or a data set (conf/trainer/warm_start/source/conversations.yaml)."""

    type: Literal["conversations"]
    path: str = Field(
        description="a file of JSON objects, one per line, with the messages of a conversation "
        "and, if there are any, its tools; a .parquet file of such rows; or the id of a data set "
        "on the Hugging Face hub"
    )
    split: str = Field(description="split of the data set; slices such as train[:90%] work too")

    @property
    def title(self) -> str:
        return f"conversations of {self.path}"


class SelectedEpisodes(SourceBlock):
    """Base of the sources of episodes, of which some are imitated."""

    only: Literal["success"] | None = Field(
        description="success: only episodes that reached env.success_reward; null: all"
    )
    best: PositiveCount | None = Field(
        description="how many episodes of a group are imitated, the best first; null: all"
    )


class EpisodesConfig(SelectedEpisodes):
    """Episodes that were recorded (conf/trainer/warm_start/source/episodes.yaml)."""

    type: Literal["episodes"]
    path: str = Field(
        description="a run, by id or folder, a folder with files of episodes, or one such file"
    )

    @property
    def title(self) -> str:
        return f"episodes of {self.path}"


class PlayedTasks(SelectedEpisodes):
    """Base of the sources of episodes that a model plays before the first step."""

    plays: ClassVar[bool] = True
    num_tasks: NumEpisodes = Field(description="tasks of the train split that are played")
    samples_per_task: NumEpisodes = Field(description="episodes of each task")
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=100.0)] = Field(
        description="sampling temperature of the model that plays"
    )


class PolicyConfig(PlayedTasks):
    """The policy itself plays: rejection sampling (conf/trainer/warm_start/source/policy.yaml)."""

    type: Literal["policy"]

    @property
    def title(self) -> str:
        return "the policy's own best episodes"


class TeacherConfig(PlayedTasks):
    """Another model plays the training tasks (conf/trainer/warm_start/source/teacher.yaml)."""

    type: Literal["teacher"]
    engine: OpenAIEngineConfig = Field(
        description="the endpoint of the model, hosted or a vLLM server of your own"
    )

    @property
    def title(self) -> str:
        return f"episodes of {self.engine.model}"
