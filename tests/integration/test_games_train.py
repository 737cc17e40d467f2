"""Train a game of two players against itself, as a user would, and resume it."""

import json

from openenv_pipe.commands.recorded_groups import recorded_groups
from openenv_pipe.rollout.collector import group_seed
from openenv_pipe.runs.episodes import read_episodes
from openenv_pipe.runs.folder import RunFolder
from tests.commands import run
from tests.crash_matrix import Result, killed_and_resumed, uninterrupted

RUN = (
    *("conf=tic_tac_toe", "~beside.defence", "device=cpu", "num_threads=1"),
    *("trainer.steps=4", "trainer.tasks_per_step=2", "trainer.group_size=4"),
    *("trainer.warm_start.steps=2", "trainer.warm_start.source.num_episodes=8"),
    *("trainer.warm_start.episodes_per_step=4", "trainer.checkpoint.every=1"),
    *("trainer.max_staleness=1", "host.sessions_per_server=8"),
    "env.players.league={every: 1, size: 1, share: 0.5}",
    # Every step changes the weights, also if no group has a signal.
    *("trainer.loss.normalise_groups=all", "trainer.loss.entropy_coef=0.01"),
    "trainer.max_sampling_rounds=1",
    *("eval.num_tasks=6", "eval.during.every=0"),
)


def test_a_game_trains_both_players_and_resumes_to_the_same_bytes(tmp_path):
    whole = uninterrupted(tmp_path / "whole", RUN, "tic_tac_toe")
    for step in (1, 2):
        groups = read_episodes(whole.folder / f"episodes/step_{step:06d}.jsonl.gz")
        assert [group.task.labels["player"] for group in groups] == ["x", "o"] * 2
        for x, o in zip(groups[::2], groups[1::2], strict=True):
            for pair in zip(x.episodes, o.episodes, strict=True):
                played = [each for each in pair if each.turns]
                earned = [sum(turn.reward for turn in each.turns) for each in played]
                assert len(played) < 2 or sum(earned) == 0.0
    # Step 4 was played ahead, while the policy of step 2 was the newest one.
    for step, earlier, trained in ((3, "step_000001", "o"), (4, "step_000002", "x")):
        *own, league = read_episodes(whole.folder / f"episodes/step_{step:06d}.jsonl.gz")
        assert [group.task.labels for group in own] == [{"player": "x"}, {"player": "o"}]
        assert league.task.labels == {"player": trained, "opponent": earlier}
    seeds = [group.seed for group in recorded_groups(RunFolder.open(whole.folder), 2)]
    assert seeds == [group_seed(0, "step 2", index) for index in (0, 0, 1, 1)]
    report = json.loads((whole.folder / "eval/trained.json").read_text())
    players = report["by_label"]["player"]
    assert {player: scores["num_tasks"] for player, scores in players.items()} == {"x": 3, "o": 3}

    trial = killed_and_resumed(tmp_path / "killed", RUN, "tic_tac_toe", whole.draw_kills(0, 1))
    assert trial.kills
    assert not any(trial.codes), trial.said
    assert Result.of(trial.folder) == Result.of(whole.folder)

    first = trial.folder / "checkpoints" / "step_000001"
    words = (f"{trial.folder}@1", f"{trial.folder}@3", f"eval.opponent={first}")
    code, out, err = run(tmp_path, "eval", *words)
    assert code == 0, err
    assert "tic_tac_toe/0001@step_000001" in out
    reports = [trial.folder / f"eval/step_00000{step}.json" for step in (1, 3)]
    opponents = [json.loads(each.read_text())["opponent"] for each in reports]
    assert opponents == ["tic_tac_toe/0001@step_000001"] * 2
