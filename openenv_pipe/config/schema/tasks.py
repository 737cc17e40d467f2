"""`env.tasks`: what the environment is reset with, in two splits."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from openenv_pipe.config.schema.base import Block, PythonTarget


class TaskRange(Block):
    """Tasks 0..num_tasks-1, each one a reset with its own seed."""

    type: Literal["range"]
    num_tasks: PositiveInt
    seed_start: NonNegativeInt = Field(description="task i is reset with seed seed_start + i")
    index_key: str | None = Field(description="reset keyword that receives i; null: none")
    reset: dict[str, Any] = Field(description="further reset keywords, the same for every task")


class ListedTasks(Block):
    """Base of the task sets whose number is known when they are read."""

    seed_start: NonNegativeInt | None = Field(
        description="task i is reset with seed seed_start + i; null: each with seed 0"
    )
    reset: dict[str, Any] = Field(description="further reset keywords, the same for every task")


class TaskRows(ListedTasks):
    """Base of the task sets made of rows. A keyword `seed` of a row is that task's seed."""

    columns: Annotated[dict[str, str], Field(min_length=1)] | None = Field(
        description="column: reset keyword that receives it; null: every column, by its own name"
    )


class TaskFile(TaskRows):
    """A task for each row of a local file."""

    type: Literal["file"]
    path: str = Field(description="JSON objects, one a line, or .csv with a header")


class TaskDataset(TaskRows):
    """A task for each row of a data set that the package `datasets` loads."""

    type: Literal["dataset"]
    path: str = Field(description="an id on the hub, a folder, or a format such as json")
    config: str | None = Field(description="where a data set has several; null: its only one")
    split: str = Field(description="of the data set; slices such as train[:90%] too")
    revision: str | None
    data_files: str | list[str] | None = Field(description="of a format; null: all that are there")


class TaskServer(ListedTasks):
    """The tasks that the environment's server lists: reset keywords `split` and `index`."""

    type: Literal["server"]
    split: str = Field(description="as the server names it")


TaskSetConfig = Annotated[
    TaskRange | TaskFile | TaskDataset | TaskServer, Field(discriminator="type")
]


class PythonOrderConfig(PythonTarget):
    """An `environments.tasks.order.TaskOrder` of your own: target(tasks, seed, **options)."""


OrderConfig = Literal["shuffle", "seed", "curriculum"] | PythonOrderConfig


class TasksConfig(Block):
    """The two splits. No task may be in both: the same reset keywords and the same seed."""

    order: OrderConfig = Field(
        description="of training. shuffle: anew for each pass; seed: as they are listed; "
        "curriculum: mostly those that the model solves at times; or a target"
    )
    train: TaskSetConfig
    eval: TaskSetConfig

    @model_validator(mode="after")
    def _splits_are_disjoint(self) -> "TasksConfig":
        """Of ranges; of all others when their rows are known."""
        train, evaluation = self.train, self.eval
        if not (isinstance(train, TaskRange) and isinstance(evaluation, TaskRange)):
            return self
        seeds_overlap = (
            train.seed_start < evaluation.seed_start + evaluation.num_tasks
            and evaluation.seed_start < train.seed_start + train.num_tasks
        )
        if seeds_overlap and train.reset == evaluation.reset:
            raise ValueError(
                "the train and eval splits share tasks: their seeds overlap and their reset "
                "keywords are equal; move eval.seed_start or give each a split keyword"
            )
        return self
