"""A run from its configuration to its report: new, resumed, or forked.

run         the process: folder, the record, the end
story       the stages, in order
warm_start, reinforce    one stage each, step by step
sources     where each step's groups come from
saving      checkpoints, written and gone back to
beginning   what is run: a new folder, one that goes on, one made from another's checkpoint
"""

from openenv_pipe.pipeline.callbacks import Callback
from openenv_pipe.pipeline.run import RunControl
from openenv_pipe.pipeline.start import begin, fork, resume, train

__all__ = ["Callback", "RunControl", "begin", "fork", "resume", "train"]
