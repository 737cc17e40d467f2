"""What `openenv-pipe sft` trains: an experiment whose only stage is supervised."""

import math
from collections.abc import Sequence

from openenv_pipe.config.compose import Composed, compose
from openenv_pipe.config.overrides import override_with_text
from openenv_pipe.extras.sft.rows import KEY, try_rows
from openenv_pipe.extras.sft.schema import ConversationsConfig

BLOCK = "trainer.warm_start"
STEPS = f"{BLOCK}.steps"
SOURCE = "trainer/warm_start/source=conversations"


def compose_sft(data: str, overrides: Sequence[str], passes: int) -> Composed:
    """Return the configuration of a run of this number of passes over the rows that can be read.

    The steps have nearly equal numbers of rows, at most `episodes_per_step`, and a tenth of them at
    most is the warm-up. Which rows are too long for the model is known later, and the run reports
    them.

    Raises ConfigError.
    """
    given = [SOURCE, override_with_text(f"{KEY}.path", data), "trainer.steps=0"]
    if not any(each.startswith("conf=") for each in overrides):
        given.insert(0, "conf=sft")
    composed = compose([*given, f"{STEPS}=1", *overrides])
    if any(each.startswith(f"{STEPS}=") for each in overrides):
        return composed
    warm_start = composed.config.trainer.warm_start
    assert isinstance(warm_start.source, ConversationsConfig)
    num_usable, _ = try_rows(warm_start.source)
    num_used = max(1, passes * num_usable)
    steps = math.ceil(num_used / warm_start.episodes_per_step)
    warm_up = min(warm_start.optimizer.lr_warmup_steps, steps // 10)
    return compose(
        [
            *given,
            f"{STEPS}={steps}",
            f"{BLOCK}.episodes_per_step={math.ceil(num_used / steps)}",
            f"{BLOCK}.optimizer.lr_warmup_steps={warm_up}",
            *overrides,
        ]
    )
