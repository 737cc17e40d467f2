"""A run with a chat template that drops earlier thoughts, from the warm start to the report."""

import json
from pathlib import Path

import pytest

from openenv_pipe.runs.episodes import read_episodes
from openenv_pipe.runs.metrics import read_metrics
from tests.commands import SMALL, run
from tests.fakes import DROPS_THOUGHTS


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rerender")
    changes = [
        "model.history=auto",
        f"model.chat_template={json.dumps(DROPS_THOUGHTS)}",
        *(
            "trainer.steps=1",
            "trainer.warm_start.steps=1",
            "eval.num_tasks=1",
            "eval.baselines=false",
        ),
    ]
    code, _, err = run(folder, "train", "conf=smoke", *SMALL, *changes)
    assert code == 0, err
    assert "the chat template rewrites earlier turns" in err
    return folder / "runs" / "smoke" / "0001"


def test_each_turn_of_an_episode_is_a_branch_and_all_are_trained(trained):
    demonstrations, *steps = [
        [episode for group in read_episodes(path) for episode in group.episodes]
        for path in sorted((trained / "episodes").glob("step_*.jsonl.gz"))
    ]
    for episode in demonstrations:
        assert len(episode.branches) == len(episode.turns)
    assert any(len(episode.branches) > 1 for episodes in steps for episode in episodes)
    for record in read_metrics(trained / "metrics.jsonl"):
        if record["stage"] == "grpo":
            assert record["turns/untrained"] == 0.0
            trained_and_skipped = record["tokens/trained"] + record["tokens/skipped"]
            assert trained_and_skipped == record["tokens/sampled"]
            assert record.get("mismatch/max", 0.0) < 1e-4


def test_a_run_with_branches_is_reproduced_from_its_episodes(trained):
    code, out, err = run(trained.parents[2], "reproduce", "smoke/0001", "--replay")
    assert code == 0, out + err
