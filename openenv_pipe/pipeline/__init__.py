"""A run from its configuration to its report: new, resumed, or forked.

run                 one attempt at a run: its folder, its record, its end
start               start a new run, resume one, or fork one
requirements        what is checked before a run starts
build, components   build the model, engine and servers of a run
stages              the list of stages, run in order
warm_start_stage, grpo_stage, evaluation_stages    the stages
group_sources       provide the scored groups of each step
weight_publisher    publish new weights to the sampler
checkpoints         save, load and delete checkpoints
"""

from openenv_pipe.pipeline.callbacks import Callback
from openenv_pipe.pipeline.run import RunControl
from openenv_pipe.pipeline.start import begin, fork, resume, train

__all__ = ["Callback", "RunControl", "begin", "fork", "resume", "train"]
