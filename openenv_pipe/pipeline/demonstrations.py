"""The episodes that the warm start imitates; `trainer.warm_start.source` says where they are from.

The `build` of a source's type is an async function of the source's configuration and a
`SourceSetup`. It returns the groups of episodes, which the run saves, and reads when it resumes.
Before a run has a folder, it calls `check` with the source's configuration. `openenv-pipe check`
calls `trial` with the run's configuration, and shows the lines that it gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openenv_pipe.config.schema import RunConfig, ScriptedSourceConfig
from openenv_pipe.environments.tasks import TaskOrder
from openenv_pipe.pipeline.components import with_scripted_policy
from openenv_pipe.registry import block_types, load
from openenv_pipe.rollout import RolloutContext, collect_groups
from openenv_pipe.system.progress import EpisodeCount
from openenv_pipe.types import Group, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSetup:
    """What a source may use."""

    config: RunConfig
    rollout: RolloutContext
    order: TaskOrder  # of the train split
    notify: Callable[[str], None]  # shows a note
    count: EpisodeCount  # of the episodes that the source plays


async def find_demonstrations(setup: SourceSetup) -> list[Group]:
    """Return the groups that `trainer.warm_start.source` gives."""
    source = setup.config.trainer.warm_start.source
    build = load(block_types("trainer.warm_start.source")[source.type].build)
    groups: list[Group] = await build(source, setup)
    return groups


def too_long_to_play(turns: Sequence[Turn], config: RunConfig) -> str:
    """Return a warning about imitated replies that GRPO would cut off; empty without any."""
    limit = max(each.env.max_reply_tokens for each in config.environments.values())
    lengths = [turn.num_completion_tokens for turn in turns]
    num_long = sum(length > limit for length in lengths)
    if not config.trainer.steps or not num_long:
        return ""
    return (
        f"{num_long} of {len(lengths)} replies that the warm start imitates "
        f"({num_long / len(lengths):.0%}) have more than env.max_reply_tokens={limit} tokens, up "
        f"to {max(lengths)}: GRPO and evaluations would cut them off; raise env.max_reply_tokens, "
        "or imitate shorter replies"
    )


async def play_scripted(source: ScriptedSourceConfig, setup: SourceSetup) -> list[Group]:
    """Let a scripted policy play tasks of the train split."""
    assert source.policy is not None
    setup.count.total = source.num_episodes
    return await collect_groups(
        with_scripted_policy(setup.rollout, source.policy),
        setup.order.take(0, source.num_episodes),
        group_size=1,
        temperature=1.0,
        seed=setup.config.seed,
        label="warm start",
        count=setup.count,
    )
