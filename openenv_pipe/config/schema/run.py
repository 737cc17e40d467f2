"""The configuration of a whole run, and whether its blocks fit together."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from openenv_pipe.config.rules import check_rules
from openenv_pipe.config.schema.agent import AgentConfig
from openenv_pipe.config.schema.base import (
    Block,
    Document,
    NonNegative,
    NumProcesses,
    Positive,
    Seed,
)
from openenv_pipe.config.schema.cluster import ClusterConfig
from openenv_pipe.config.schema.engine import EngineConfig
from openenv_pipe.config.schema.env import EnvConfig
from openenv_pipe.config.schema.eval import EvalConfig
from openenv_pipe.config.schema.host import HostConfig
from openenv_pipe.config.schema.judge import JudgeConfig
from openenv_pipe.config.schema.model import ModelConfig
from openenv_pipe.config.schema.reward import RewardConfig
from openenv_pipe.config.schema.tracker import TrackerConfigs
from openenv_pipe.config.schema.trainer import AdvantageConfig, TrainerConfig


class _Composed(Document):
    """Base of what is composed of blocks, which have to go together."""

    @model_validator(mode="after")
    def _follows_the_rules(self) -> Self:
        check_rules(self, "always")
        return self


class ServingConfig(_Composed):
    """An environment and its host: the blocks that `openenv-pipe env` needs."""

    env: EnvConfig
    host: HostConfig


class BesideConfig(Block):
    """An environment beside the first one, with all that belongs to it.

    In YAML and on the command line, its key `conf` names the experiment from which all keys come
    that are not given.
    """

    weight: Positive = Field(
        description="how often its tasks are trained on, relative to 1 for those of env"
    )
    env: EnvConfig
    host: HostConfig
    reward: RewardConfig
    judge: JudgeConfig
    eval: EvalConfig = Field(
        description="its evaluations, which are played whenever those of env are"
    )
    advantage: AdvantageConfig = Field(description="as trainer.advantage, for its groups")
    teacher: str | None = Field(
        description="as trainer.loss.kl.reference, for its episodes; null: the same"
    )


class RunConfig(_Composed):
    """The configuration of a run (conf/config.yaml)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] = Field(
        description="the experiment's name: the run folder is <runs_dir>/<name>/<number>"
    )
    seed: Seed = Field(description="seed of all randomness of the run")
    runs_dir: str = Field(description="folder of all run folders")
    device: Literal["auto", "cpu", "cuda"] = Field(
        description="where the learner runs; auto: cuda if there is a GPU"
    )
    num_threads: NumProcesses | None = Field(
        description="torch's threads on the CPU; null: one per core"
    )
    price_per_hour: NonNegative = Field(
        description="what all machines of the run cost per hour, in the unit of the judge's "
        "prices, for the report; 0: not given"
    )
    env: EnvConfig
    host: HostConfig
    reward: RewardConfig
    judge: JudgeConfig
    agent: AgentConfig
    model: ModelConfig
    engine: EngineConfig
    cluster: ClusterConfig
    trainer: TrainerConfig
    eval: EvalConfig
    tracker: TrackerConfigs = Field(description="the trackers, by name")
    beside: dict[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")], BesideConfig] = Field(
        description="further environments of the run, by name; each has its own tasks, host, "
        "reward and evaluation, and `conf` names the experiment that these are from"
    )

    @property
    def environments(self) -> dict[str, "RunConfig"]:
        """The run of each environment alone, by the name that its tasks have: "" for `env`.

        Only the first one has a warm start.
        """
        no_warm_start = self.trainer.warm_start.model_copy(update={"steps": 0})
        first = self.model_copy(update={"beside": {}}) if self.beside else self
        return {"": first} | {
            name: first.model_copy(
                update={
                    "env": each.env,
                    "host": each.host,
                    "reward": each.reward,
                    "judge": each.judge,
                    "eval": each.eval,
                    "trainer": self.trainer.model_copy(
                        update={
                            "advantage": each.advantage,
                            "warm_start": no_warm_start,
                            "loss": self.trainer.loss.with_teacher(each.teacher),
                        }
                    ),
                }
            )
            for name, each in self.beside.items()
        }

    @property
    def opponent_checkpoint(self) -> str | None:
        """The folder of the checkpoint that plays against the model in evaluations of `env`."""
        named = self.eval.opponent
        return None if named is None or named in self.env.baselines else named

    @property
    def capacity(self) -> int:
        """How many episodes all environments play at once."""
        return sum(each.host.capacity for each in self.environments.values())

    @property
    def max_episode_tokens(self) -> int:
        """The tokens of the longest episode of all environments."""
        return max(each.env.max_episode_tokens for each in self.environments.values())

    @property
    def ranks_per_node(self) -> int:
        """How many of trainer.devices are on each node of the learner, this machine included."""
        return self.trainer.devices // self.cluster.num_learner_nodes
