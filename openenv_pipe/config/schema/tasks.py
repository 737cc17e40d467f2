"""`env.tasks`: the tasks of both splits, each a set of keywords for the environment's reset."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from openenv_pipe.config.schema.base import Block, NumEpisodes, PositiveShare, PythonTarget, Seed


class TaskRange(Block):
    """Tasks 0..num_tasks-1, each a reset with its own seed (conf/env/tasks/range.yaml)."""

    type: Literal["range"]
    num_tasks: NumEpisodes
    seed_start: Seed = Field(description="task i is reset with seed seed_start + i")
    index_key: str | None = Field(description="reset keyword that receives i; null: none")
    reset: dict[str, Any] = Field(description="further reset keywords, the same for every task")

    @property
    def title(self) -> str:
        """Which tasks these are, for reports; it may contain untrusted text."""
        return str(self.num_tasks)


class ListedTasks(Block):
    """Base of the task sets whose size is known only when they are read."""

    seed_start: Seed | None = Field(
        description="task i is reset with seed seed_start + i; null: each with seed 0"
    )
    reset: dict[str, Any] = Field(description="further reset keywords, the same for every task")


class TaskRows(ListedTasks):
    """Base of the task sets made of rows. A row's `seed`, if there is one, is the task's seed."""

    columns: Annotated[dict[str, str], Field(min_length=1)] | None = Field(
        description="maps columns to reset keywords; null: every column under its own name"
    )
    required: list[str] = Field(
        description="reset keywords for which every row has to have a value that is not empty; a "
        "warning counts the eval tasks that share the first one's value with a training task"
    )
    labels: list[str] = Field(
        description="columns that say what kind of task a row is, such as its difficulty or topic, "
        "for tables of evaluations and curricula; reset does not get them, unless `columns` names "
        "them too"
    )

    @model_validator(mode="after")
    def _labels_are_no_keys_of_tasks(self) -> Self:
        if "seed" in self.labels and self.columns is None:
            raise ValueError(
                "labels names the column 'seed', which is each task's seed; remove it from labels"
            )
        if "player" in self.labels:
            raise ValueError(
                "labels names the column 'player', and this label says who plays in games "
                "(env.players); give the column another name"
            )
        return self


class TaskFile(TaskRows):
    """A task for each row of a local file (conf/env/tasks/file.yaml)."""

    type: Literal["file"]
    path: str = Field(
        description="a file of JSON objects, one per line, or .csv with a header line, in which a "
        "column is numbers or booleans if every cell prints back as it was read, else text"
    )

    @property
    def title(self) -> str:
        return f"the rows of {self.path}"


class TaskDataset(TaskRows):
    """A task for each row of a Hugging Face data set (conf/env/tasks/dataset.yaml)."""

    type: Literal["dataset"]
    path: str = Field(description="an id on the hub, a folder, or a format such as json")
    config: str | None = Field(description="configuration of the data set; null: its only one")
    split: str = Field(description="split of the data set; slices such as train[:90%] work too")
    revision: str | None = Field(description="branch, tag or commit on the hub; null: the newest")
    data_files: str | list[str] | None = Field(
        description="files to read when path is a format or a folder; null: all files"
    )

    @property
    def title(self) -> str:
        return f"the rows of {self.path}, split {self.split}"


class TaskFolders(ListedTasks):
    """A task for each sub-folder of a local folder (conf/env/tasks/folders.yaml).

    Its path, relative to the folder in which the run was started, is the reset keyword `path`.
    """

    type: Literal["folders"]
    path: str = Field(description="the folder; hidden sub-folders do not count")
    contains: str | None = Field(
        description="only sub-folders that have this file are tasks; null: all"
    )

    @property
    def title(self) -> str:
        return f"the folders in {self.path}"


class TaskServer(ListedTasks):
    """The tasks that the server lists, by reset keywords `split` and `index`.

    Values: conf/env/tasks/server.yaml.
    """

    type: Literal["server"]
    split: str = Field(description="split of the server's task API")

    @property
    def title(self) -> str:
        return f"the server's, split {self.split}"


class TaskShare(Block):
    """A share of the training tasks, which training then leaves out (conf/env/tasks/share.yaml).

    A hash of each task decides, so that the order of the rows does not matter and equal rows stay
    together; with `by`, so do rows that ask the same thing.
    """

    type: Literal["share"]
    share: PositiveShare = Field(
        description="of the rows or folders of env.tasks.train, rounded to whole tasks"
    )
    by: str | None = Field(
        description="a reset keyword, such as question: tasks with the same value of it are either "
        "all trained on or all left out; null: only tasks that are equal in everything are"
    )

    @property
    def title(self) -> str:
        together = f", undivided by {self.by}" if self.by else ""
        return f"a share of {self.share:g} of the rows or folders of training{together}"

    @property
    def reset(self) -> dict[str, Any]:
        """No further reset keywords: the training tasks have them."""
        return {}


TrainSetConfig = Annotated[
    TaskRange | TaskFile | TaskDataset | TaskFolders | TaskServer, Field(discriminator="type")
]
TaskSetConfig = Annotated[TrainSetConfig | TaskShare, Field(discriminator="type")]


class PythonOrderConfig(PythonTarget):
    """An `environments.tasks.order.TaskOrder` of your own: target(tasks, seed, **options)."""


OrderConfig = Literal["shuffle", "seed", "curriculum", "curriculum_by_cost"] | PythonOrderConfig


class TasksConfig(Block):
    """The two splits. No task (the same reset keywords and seed) may be in both."""

    order: OrderConfig = Field(
        description="order in training; shuffle: shuffled anew in each pass; seed: as listed; "
        "curriculum: mostly tasks that the model sometimes solves; curriculum_by_cost: the same, "
        "with short ones preferred; or a target of your own"
    )
    train: TrainSetConfig
    eval: TaskSetConfig

    @model_validator(mode="after")
    def _share_is_of_listed_tasks(self) -> Self:
        if isinstance(self.eval, TaskShare) and self.train.type in ("range", "server"):
            raise ValueError(
                f"env.tasks.eval.type=share divides the rows or folders of env.tasks.train, whose "
                f"type is {self.train.type}; set another type for one of them"
            )
        return self
