"""A run from its configuration to its report: new, resumed, or forked.

run                 one attempt: its folder, its record, its end
start               what an attempt works on: a new folder, one that goes on, a fork
build, components   what the stages work with
stages              the list of stages, run in order
warm_start_stage, grpo_stage, evaluation_stages    the stages
group_sources       where the groups of each step come from
weight_publisher    who gives new weights to the sampler
checkpoints         checkpoints, written and gone back to
"""

from openenv_pipe.pipeline.callbacks import Callback
from openenv_pipe.pipeline.run import RunControl
from openenv_pipe.pipeline.start import begin, fork, resume, train

__all__ = ["Callback", "RunControl", "begin", "fork", "resume", "train"]
