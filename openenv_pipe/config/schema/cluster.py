"""`cluster`: on which machines the parts of a run work."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from openenv_pipe.config.schema.base import Block
from openenv_pipe.config.schema.registered import Registered

RayAddress = Annotated[
    str, Field(pattern=r"^(auto|[\w.\[\]:-]+:\d{1,5})$", examples=["10.0.0.7:6379"])
]


class ClusterBlock(Block):
    """Base of the clusters; by its defaults, everything is on this machine."""

    type: str
    plays_on_nodes: ClassVar[bool] = False  # other machines play the episodes

    @property
    def num_learner_nodes(self) -> int:
        """How many machines share trainer.devices equally, this one included."""
        return 1

    @property
    def serves_on_nodes(self) -> bool:
        """Whether vLLM servers are started on other machines."""
        return False

    @property
    def num_restarts(self) -> int:
        """How many times, at most, a run that lost a learner process restarts from a checkpoint."""
        return 0


class LocalClusterConfig(ClusterBlock):
    """Everything runs on this machine (conf/cluster/local.yaml)."""

    type: Literal["local"]


ClusterConfig = Annotated[ClusterBlock, Registered("cluster")]
