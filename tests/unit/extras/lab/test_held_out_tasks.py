"""Eval tasks that look like training tasks are counted, whatever their keywords are."""

from types import SimpleNamespace

from test_env_probes import each_alone

from openenv_pipe.commands.findings import Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.errors import ConfigError, StepRejectedError
from openenv_pipe.extras.lab.check import held_out
from openenv_pipe.extras.lab.check.held_out import held_out_line


def one_each(*texts: str, end: str = "b") -> list[PlayedEpisode]:
    return [play for (play,) in each_alone(*texts, end=end)]


def test_eval_tasks_that_are_training_tasks_are_counted():
    """Ids, seeds and times do not hide that they are."""
    apart, others = one_each("0", "1", "2"), one_each("7", "1", "2")
    others[1].observations[0] |= {"task_id": "eval/1", "seed": 9, "metadata": {"split": "eval"}}
    apart[1].observations[0] |= {"task_id": "train/5", "seed": 4}
    line = held_out_line(apart, others, "env.baselines.expert", num_train=30)
    assert (line.result, line.measured["same"]) == (Result.WARN, 2)
    assert line.text.startswith(
        "2 of 3 eval tasks have the first observation of one of 3 of 30 training tasks, and 2 the "
        "same whole episode, played by env.baselines.expert: 2 eval tasks repeat training tasks"
    )
    assert held_out_line(apart, others[:1], "me", num_train=3).result is Result.OK
    others[1].failure = StepRejectedError("EXECUTION_ERROR", "it raised")
    line = held_out_line(apart, others, "me", num_train=3)
    assert line.measured["same"] == 1, "it was cut before it could differ"
    assert held_out_line(apart, [], "me", num_train=3) is None


def test_tasks_that_begin_alike_are_told_apart_by_what_follows_or_not_at_all():
    alike = one_each("a", "a", "a", "a")
    for number, play in enumerate(alike):
        play.observations[1] |= {"text": str(number)}
    line = held_out_line(alike, one_each("a", "a", end="9"), "me", num_train=4)
    assert (line.result, line.measured["begun"], line.measured["same"]) == (Result.OK, 2, 0)
    few = one_each("a", "a", "a", "b")
    line = held_out_line(few, one_each("a", "c"), "me", num_train=4)
    assert line.result is Result.WARN
    assert "neither first observations nor these episodes tell tasks apart" in line.text
    assert "different episodes: 2 in training, 2 in the evaluation" in line.text
    one_start = held_out_line(one_each(*"abcdef"), one_each(*"aaaaaa"), "me", num_train=6)
    assert "tell tasks apart" in one_start.text


async def test_seeds_alone_where_the_server_has_splits_are_a_warning(monkeypatch):
    async def split_keys(env, host):
        return {"train": {"num_tasks": 8}, "eval": {"num_tasks": 1}}

    async def expert():
        raise ConfigError("no module pantry")

    monkeypatch.setattr(held_out, "split_keys", split_keys)
    subject = SimpleNamespace(env=None, host=None, expert=expert)
    lines = [line async for line in held_out.probe_held_out(subject)]
    assert [(line.name, line.result) for line in lines] == [
        ("splits", Result.WARN),
        ("held-out tasks", Result.WARN),
    ]
    assert "set env.tasks to what the server has: train: {'num_tasks': 8}; eval:" in lines[0].text
    assert "the expert cannot be played: no module pantry" in lines[1].text
