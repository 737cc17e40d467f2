"""`rescore` of a run with another reward gives what a run with that reward has recorded."""

import json
from pathlib import Path

import pytest

from openenv_pipe.runs.episodes import episodes_path, read_episodes
from tests.commands import SMALL, run

TERMS = "def short(episode):\n    return 1 / (1 + len(episode.turns[-1].reply))\n"
SHORT = """terms:
  env: {type: env, use: sum, weight: 0.25, per_turn: true}
  short:
    {type: python, target: "my_terms:short", keywords: {}, use: sum, weight: 2.0, per_turn: false}
  letters: {type: regex, pattern: "[a-m]", weight: -0.1, per_turn: true}
transforms: {short: [{type: standardise}]}
"""
STEPS = ("trainer.steps=1", "trainer.warm_start.steps=0", "eval.baselines=false")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "conf/reward").mkdir(parents=True)
    (tmp_path / "conf/reward/short.yaml").write_text(SHORT)
    (tmp_path / "my_terms.py").write_text(TERMS)
    return tmp_path


def test_a_run_scored_again_has_the_rewards_of_a_run_with_that_reward(folder):
    # Beside the chosen reward, the experiment has a term of its own.
    for reward in (["reward=env"], ["reward=short", "~reward.terms.vowels"]):
        code, _, err = run(folder, "train", "conf=smoke", *SMALL, *STEPS, *reward)
        assert code == 0, err
    first, second = (folder / "runs/smoke" / name for name in ("0001", "0002"))
    before = contents(first)
    code, out, err = run(folder, "rescore", "smoke/0001", "reward=short", "--format", "json")
    assert code == 0, err
    assert contents(first) == before
    output = folder / "runs/smoke/0001_rescored"
    rescored, trained = (read_episodes(episodes_path(each, 1)) for each in (output, second))
    assert rescored == trained
    own = read_episodes(episodes_path(first, 1))
    assert own != trained
    found = json.loads(out)
    episodes = [episode for group in trained for episode in group.scored]
    values = [episode.reward_terms["short"] for episode in episodes]
    assert found["means"]["short"] == {
        "run": None,
        "now": pytest.approx(sum(values) / len(values)),
    }
    assert found["agreement"]["episodes"] == len(episodes)
    code, _, err = run(folder, "rescore", "smoke/0001", "reward=short")
    assert code == 2 and "0001_rescored exists" in err


def test_what_cannot_be_scored_again_is_an_error(folder):
    code, _, err = run(folder, "train", "conf=smoke", *SMALL, *STEPS)
    assert code == 0, err
    for words, message in (
        (["smoke/0001", "trainer.steps=3"], "trainer.steps cannot be changed for recorded"),
        (["smoke/0001", "--step", "7"], "the run has episodes of steps 1 to 1"),
        (["smoke/0001", "reward=short", "reward.terms.short.target=my_terms:no"], "my_terms"),
        (["smoke/0001", "-o", "runs/smoke/0001/again"], "which stays as it is"),
        (["reward=env"], "got 0 runs"),
    ):
        code, _, err = run(folder, "rescore", *words)
        assert code == 2 and message in err, err
        assert not (folder / "runs/smoke/0001_rescored").exists()
    other = folder / "runs/smoke/0001_rescored"
    (other / "verdicts").mkdir(parents=True)  # as an attempt leaves it whose judge failed
    code, _, err = run(folder / "runs/smoke/0001", "rescore", ".", "reward=env")
    assert code == 0, err
    assert sorted(path.name for path in other.iterdir()) == ["episodes", "verdicts"]
