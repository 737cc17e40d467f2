"""`beside`: further environments that the policy learns in the same run."""

from pydantic import Field

from openenv_pipe.config.schema.base import Block, Positive
from openenv_pipe.config.schema.env import EnvConfig
from openenv_pipe.config.schema.eval import EvalConfig
from openenv_pipe.config.schema.host import HostConfig
from openenv_pipe.config.schema.judge import JudgeConfig
from openenv_pipe.config.schema.reward import RewardConfig
from openenv_pipe.config.schema.trainer import AdvantageConfig


class BesideConfig(Block):
    """An environment beside the first one, with all that belongs to it.

    In YAML and on the command line its key `conf` names an experiment, whose blocks these are
    where they are not given.
    """

    weight: Positive = Field(
        description="how often its tasks are trained on, compared with the 1 of env"
    )
    env: EnvConfig
    host: HostConfig
    reward: RewardConfig
    judge: JudgeConfig
    eval: EvalConfig = Field(
        description="its evaluations, which are played whenever those of env are"
    )
    advantage: AdvantageConfig = Field(description="as trainer.advantage, for its groups")
