"""What `rescore` reports about two rewards of the same episodes."""

import pytest
import run_samples

from openenv_pipe import Run, open_run, rescore
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.extras.rescore.rescore import Changes
from openenv_pipe.types import Episode, Group, Status, Task

TASK = Task(id="train/0", split="train", index=0, seed=0)


def group(*rewards, **terms):
    episodes = [
        Episode(
            task=TASK,
            member=member,
            seed=member,
            status=Status.DONE,
            reward=0.0 if reward is None else reward,
            unscored="no verdict" if reward is None else None,
            reward_terms={name: values[member] for name, values in terms.items()},
        )
        for member, reward in enumerate(rewards)
    ]
    return Group(id="train/0", task=TASK, episodes=episodes)


def test_means_are_of_scored_episodes_and_name_the_terms_of_both():
    changes = Changes()
    changes.add(group(0.0, 1.0, env=[0.0, 1.0]), group(2.0, None, judge=[4.0, 9.0]))
    assert changes.means == [
        ("reward", 0.5, 2.0),
        ("success", 0.0, 0.0),
        ("env", 0.5, None),
        ("judge", None, 4.0),
    ]


def test_agreement_by_hand():
    changes = Changes()
    changes.add(group(0.0, 1.0), group(0.0, 2.0))  # the same order
    changes.add(group(0.0, 1.0), group(1.0, 0.0))  # the other order
    changes.add(group(0.0, 0.0), group(0.0, 1.0))  # an order where there was none
    changes.add(group(1.0, 1.0), group(1.0, None))  # nothing to compare any more
    found = changes.agreement
    assert found["episodes"] == 7
    assert found["equal_share"] == pytest.approx(3 / 7)
    assert found["correlation"] == pytest.approx(6 / (12 * 24) ** 0.5)
    assert (found["groups"], found["groups_reordered"]) == (4, 2)
    assert (found["groups_with_signal_before"], found["groups_with_signal_now"]) == (2, 3)


def test_a_constant_reward_has_no_correlation():
    changes = Changes()
    assert changes.agreement["correlation"] is None
    changes.add(group(0.0, 1.0), group(1.0, 1.0))
    assert changes.agreement["correlation"] is None


def test_the_function_scores_a_run_again_and_shows_the_means(tmp_path):
    folder = run_samples.create(tmp_path / "runs")
    run_samples.train(folder)
    found = rescore(Run(folder.path), "reward=usable", output=tmp_path / "again", step=2)
    assert [path.name for path in (found.output / "episodes").iterdir()] == ["step_000002.jsonl.gz"]
    first, *_, last = repr(found).splitlines()
    before, now = (f"{mean:.4g}" for mean in found.changes.means[0][1:])
    frame = found.episodes(2).to_pandas()
    assert set(frame["step"]) == {2}
    assert frame["reward"].mean() == pytest.approx(found.changes.means[0][2])
    with pytest.raises(ConfigError, match=r"again exists; .*\(from Python: output=\"DIR\"\)"):
        rescore(folder.path, "reward=usable", output=tmp_path / "again")
    with pytest.raises(RunFolderError, match="as rescore makes it; in Python: openenv_pipe"):
        open_run(found.output)
    assert first == f"reward: {before} in the run, {now} now" and last == str(tmp_path / "again")
