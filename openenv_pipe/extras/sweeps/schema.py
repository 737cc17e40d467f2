"""`sweep`: the jobs that `train -m` makes of several values. A run itself has no such block."""

from typing import Annotated, Literal

from pydantic import Field

from openenv_pipe.config.schema.base import (
    Block,
    Count,
    Document,
    NumCores,
    NumGpus,
    PositiveCount,
    Seed,
)
from openenv_pipe.config.schema.cluster import RayAddress


class RayJobs(Block):
    """Jobs as tasks of a Ray cluster, as many at once as its nodes have room for."""

    address: RayAddress | None = Field(
        description="host:port of the cluster's head; auto: RAY_ADDRESS, else the cluster to which "
        "this machine belongs; null: the jobs run one after another"
    )
    cpus_per_job: NumCores = Field(description="cores that Ray reserves for each job")
    gpus_per_job: NumGpus = Field(
        description="GPUs that Ray reserves for each job, the only ones visible to it"
    )


class GridSweep(Block):
    """Every combination of the values, once (conf/sweep/grid.yaml)."""

    type: Literal["grid"]
    ray: RayJobs


class SearchSweep(Block):
    """Values that Optuna proposes from the results of earlier jobs (conf/sweep/search.yaml)."""

    type: Literal["search"]
    ray: RayJobs
    num_jobs: PositiveCount = Field(description="jobs in total")
    at_a_time: PositiveCount = Field(
        description="jobs proposed together, which run in parallel on a Ray cluster"
    )
    metric: str = Field(description="key of metrics.jsonl in GRPO's steps by which jobs are judged")
    goal: Literal["max", "min"] = Field(description="whether a high or a low value is best")
    mean_of: PositiveCount = Field(
        description="a job's result is the metric's mean over this many of its last steps"
    )
    seed: Seed = Field(description="seed of the proposals")
    num_random: Count = Field(description="first jobs, with values drawn at random")
    prune: bool = Field(
        description="stop a job whose result so far is worse than the median of earlier jobs"
    )
    num_unpruned: Count = Field(description="first jobs, which are never stopped early")
    prune_from_step: Count = Field(description="step from which a job may be stopped")


SweepConfig = Annotated[GridSweep | SearchSweep, Field(discriminator="type")]


class SweepSettings(Document):
    """The `sweep` block under its name, as it is composed."""

    sweep: SweepConfig
