"""`agent`: what plays the episodes, and `agent.sandbox`: where it runs if it is a program."""

from typing import Annotated, ClassVar, Literal

from openenv_pipe.config.schema.base import Block
from openenv_pipe.config.schema.registered import Registered


class AgentBlock(Block):
    """Base of the agents."""

    type: str
    is_loop: ClassVar[bool] = False  # the pipeline's own loop plays
    # Whether it plays whenever the run needs an episode; False: clients decide when they play.
    plays_on_demand: ClassVar[bool] = True

    @property
    def needs_environment(self) -> bool:
        """Whether the reward comes from steps in an environment."""
        return True

    @property
    def is_open(self) -> bool:
        """Whether other machines reach it without a token of the user's own."""
        return False


class LoopAgentConfig(AgentBlock):
    """The pipeline turns observations into prompts, replies into actions (conf/agent/loop.yaml)."""

    type: Literal["loop"]
    is_loop: ClassVar[bool] = True


class SandboxBlock(Block):
    """Base of the sandboxes."""

    type: str
    is_this_machine: ClassVar[bool] = False  # programs can read our files, inherit our variables


SandboxConfig = Annotated[SandboxBlock, Registered("agent.sandbox")]

AgentConfig = Annotated[AgentBlock, Registered("agent")]
