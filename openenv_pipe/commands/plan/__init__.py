"""`openenv-pipe plan`: what a number of GPUs gives for a configuration, on paper."""

from openenv_pipe.commands.plan.cluster import Cluster, split_cluster
from openenv_pipe.commands.plan.constants import CONSTANTS, GPUS
from openenv_pipe.commands.plan.estimate import Plan, make_plan
from openenv_pipe.commands.plan.shapes import shape_of
from openenv_pipe.commands.plan.text import as_table, constants_table

__all__ = [
    "CONSTANTS",
    "GPUS",
    "Cluster",
    "Plan",
    "as_table",
    "constants_table",
    "make_plan",
    "shape_of",
    "split_cluster",
]
