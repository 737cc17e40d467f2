"""Check that the tasks of the evaluation are not those of training, as far as play can show it.

Two tasks may be the same although their keywords and seeds differ. One policy, which draws the same
random numbers in every task, plays tasks of both splits, and the episodes are compared.
"""

from collections.abc import AsyncIterator, Sequence

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.tasks import TaskSet
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest
from openenv_pipe.extras.lab.comparison import Told, told
from openenv_pipe.extras.lab.episodes import Chooser
from openenv_pipe.extras.lab.server_splits import split_keys
from openenv_pipe.types import Task

NAME = "held-out tasks"  # of the line
MAX_TRAIN, MAX_EVAL = 1000, 200  # tasks that are played, evenly spaced
LIMIT_S = 15.0  # for each split
# If more than this fraction of each split's episodes are distinct, equal ones are the same task.
TOLD_APART = 0.5


async def probe_held_out(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    """Play many tasks of both splits by the expert, at random if there is none."""
    if (keys := await split_keys(subject.env, subject.host)) is not None:
        written = "; ".join(f"{split}: {dict(values)}" for split, values in keys.items())
        text = (
            "the server lists splits, and reset takes `split` and `index`, but tasks of the "
            "evaluation differ from those of training only in their seeds, which may draw the same "
            f"ones; set env.tasks to what the server has: {written}"
        )
        yield Line("splits", Result.WARN, text)
    try:
        player, chooser = await subject.expert() or ("random actions", subject.choosers["random"])
        held_out = await _play(subject, chooser, _spaced(subject.eval_tasks, MAX_EVAL))
        train = await _play(subject, chooser, _spaced(subject.tasks, MAX_TRAIN))
    except ConfigError as error:
        yield Line(NAME, Result.WARN, f"not compared, because the expert cannot be played: {error}")
        return
    line = held_out_line(train, held_out, player, num_train=len(subject.tasks))
    if line is not None:
        yield line


def _spaced(tasks: TaskSet, count: int) -> list[Task]:
    count = min(count, len(tasks))
    return [tasks[place * len(tasks) // count] for place in range(count)]


async def _play(
    subject: EnvironmentUnderTest, chooser: Chooser, tasks: Sequence[Task]
) -> list[PlayedEpisode]:
    """Play tasks alike; those that the time limit cut off are left out."""
    plays: list[PlayedEpisode] = []

    async def do(session: Session, task: Task) -> None:
        plays.append(await subject.play_task(session, task, chooser))

    await subject.spread(tasks, do, limit_s=LIMIT_S)
    return plays


def held_out_line(
    train: Sequence[PlayedEpisode],
    held_out: Sequence[PlayedEpisode],
    player: str,
    *,
    num_train: int,
) -> Line | None:
    """Say how many eval tasks begin, and go on, like a training task; None if nothing was played.

    An episode that failed has shown too little, and is left out.

    num_train: all training tasks, of which some were played.
    """
    train = [play for play in train if play.failure is None]
    held_out = [play for play in held_out if play.failure is None]
    if not train or not held_out:
        return None
    begun_before = {told(play.observations[0]) for play in train}
    seen_before, seen_of_eval = {_seen(play) for play in train}, {_seen(play) for play in held_out}
    num_begun = sum(told(play.observations[0]) in begun_before for play in held_out)
    num_same = sum(_seen(play) in seen_before for play in held_out)
    measured = {
        "tasks": len(held_out),
        "train_tasks": len(train),
        "begun": num_begun,
        "same": num_same,
        "different_train": len(seen_before),
        "different_eval": len(seen_of_eval),
    }
    more = f" of {num_train}" if len(train) < num_train else ""
    text = (
        f"{num_begun} of {len(held_out)} eval tasks have the first observation of one of "
        f"{len(train)}{more} training tasks, and {num_same} the same whole episode, "
        f"played by {player}"
    )
    if not num_same:
        return Line(NAME, Result.OK, text, measured)
    shares = (len(seen_before) / len(train), len(seen_of_eval) / len(held_out))
    if min(shares) > TOLD_APART:
        text += (
            f": {num_same} eval tasks repeat training tasks; choose others for env.tasks.eval, if "
            "the environment has any"
        )
        return Line(NAME, Result.WARN, text, measured)
    text += (
        "; neither first observations nor these episodes tell tasks apart (different episodes: "
        f"{len(seen_before)} in training, {len(seen_of_eval)} in the evaluation), so eval "
        "tasks may be training tasks"
    )
    return Line(NAME, Result.WARN, text, measured)


def _seen(play: PlayedEpisode) -> tuple[tuple[Told, float | None, bool], ...]:
    return tuple((told(each.observation), each.reward, each.done) for each in play.results)
