"""A run of supervised steps on conversations, killed and resumed."""

import json

from openenv_pipe.reports.runs_table import list_runs
from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from tests.commands import run
from tests.crash_matrix import Result, killed_and_resumed, uninterrupted

STEPS = 40


def test_killed_and_resumed_it_equals_the_uninterrupted_run(tmp_path):
    """Without an environment: nothing is played and nothing is evaluated."""
    data = tmp_path / "rows.jsonl"
    rows = [
        [
            {"role": "user", "content": f"{number} and one?"},
            {"role": "assistant", "content": str(number + 1)},
        ]
        for number in range(20)
    ]
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    settings = (
        *("conf=sft", "model=tiny", "device=cpu", "num_threads=1", "env.max_episode_tokens=512"),
        *("trainer/warm_start/source=conversations", f"trainer.warm_start.source.path={data}"),
        *(f"trainer.warm_start.steps={STEPS}", "trainer.warm_start.episodes_per_step=3"),
        "trainer.checkpoint.every=4",
    )
    whole = uninterrupted(tmp_path / "whole", settings, "sft")
    records = read_metrics(whole.folder / "metrics.jsonl")
    assert [record["stage"] for record in records] == ["warm_start"] * STEPS
    assert records[-1]["loss/supervised"] < records[0]["loss/supervised"]
    assert list((whole.folder / "eval").glob("*.json")) == []
    report = (whole.folder / "report.md").read_text()
    assert f"{STEPS} of {STEPS} supervised steps" in report
    assert f"from {records[0]['loss/supervised']:.3f} to" in report
    (row,) = list_runs([tmp_path / "whole"])
    assert (row.step, row.num_steps) == (STEPS, STEPS)
    trial = killed_and_resumed(tmp_path / "killed", settings, "sft", [(2, 0.0), (9, 0.0)])
    assert len(trial.kills) == 2
    assert not any(trial.codes), trial.said
    assert RunFolder.open(trial.folder).status == "finished"
    assert Result.of(trial.folder).difference(Result.of(whole.folder)) is None


def test_replies_that_grpo_would_cut_off_are_named_and_their_file_is_read_once(tmp_path):
    data = tmp_path / "rows.jsonl"
    row = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 20}]
    data.write_text(json.dumps({"messages": row}) + "\n")
    code, _, said = run(
        *(tmp_path, "train", "conf=echo", "device=cpu", "num_threads=1", "trainer.steps=1"),
        *("trainer.tasks_per_step=1", "trainer.group_size=2", "eval.num_tasks=1"),
        *("trainer/warm_start/source=conversations", f"trainer.warm_start.source.path={data}"),
        *("trainer.warm_start.steps=1", "env.max_reply_tokens=4", "trainer.checkpoint.every=1"),
    )
    assert code == 0, said
    assert "1 of 1 replies that the warm start imitates (100%) have more than" in said
    data.unlink()
    folder = tmp_path / "runs" / "echo" / "0001"
    code, _, said = run(tmp_path, "train", "--resume", str(folder), "trainer.steps=2")
    assert code == 0, said
    assert RunFolder.open(folder).status == "finished"


def test_the_policy_imitates_the_best_of_its_own_episodes(tmp_path):
    """Also if it is killed: the episodes are played once, by the weights of the start."""
    source = "trainer.warm_start.source"
    settings = (
        *("conf=echo", "device=cpu", "num_threads=1", "trainer.steps=0", "eval.num_tasks=2"),
        *("trainer/warm_start/source=policy", f"{source}.only=null", f"{source}.num_tasks=4"),
        *("eval.baselines=false", f"{source}.samples_per_task=6"),
        *("trainer.warm_start.steps=6", "trainer.warm_start.episodes_per_step=3"),
        "trainer.checkpoint.every=2",
    )
    whole = uninterrupted(tmp_path / "whole", settings, "echo")
    groups = list(read_episodes(episodes_path(whole.folder, 0)))
    assert [len(group.episodes) for group in groups] == [1] * 4
    assert {episode.member for group in groups for episode in group.episodes} != {0}
    trial = killed_and_resumed(tmp_path / "killed", settings, "echo", [(3, 0.0)])
    assert not any(trial.codes), trial.said
    assert Result.of(trial.folder).difference(Result.of(whole.folder)) is None
