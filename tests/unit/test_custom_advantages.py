"""A user's advantage function: what it receives, and what it may return."""

import asyncio
import copy

import numpy as np
import pytest
from fakes import made_up_group, run_config

from openenv_pipe.algorithms.advantages import step_advantages
from openenv_pipe.algorithms.samples import build_samples
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.pipeline.grpo_stage import build_advantages

GROUPS = [made_up_group([1.0, 3.0, 5.0], failed=[1], id="0"), made_up_group([2.0, 2.0], id="1")]


def above(groups, *, threshold):
    """Return 1 or -1 for all turns of an episode; None for groups whose episodes are all alike."""
    values = [[1.0 if e.reward > threshold else -1.0 for e in group.scored] for group in groups]
    return [
        [[value] * len(e.turns) for value, e in zip(each, group.scored, strict=True)]
        if len(set(each)) > 1
        else None
        for group, each in zip(groups, values, strict=True)
    ]


RETURNED = {
    "too few groups": [[[1.0], [1.0]]],
    "a member too many": [[[1.0], [1.0], [1.0]], None],
    "a turn too many": [[[1.0, 2.0], [1.0]], None],
    "not finite": [[[float("nan")], [1.0]], None],
    "a number": 1.0,
    "texts": ["12", None],
    "a text for an episode": [["1", [1.0]], None],
    "a set": [[{1.0}, [1.0]], None],
    "a dict for a group": [{0: [1.0], 1: [1.0]}, None],
}


def given(groups, *, name):
    return RETURNED[name]


def build(name, /, **options):
    own = {"type": "python", "target": f"{__name__}:{name}", "options": options}
    config = run_config({"trainer.advantage": own})
    return build_advantages(config.trainer.advantage, config.reward)


def test_numbers_belong_to_the_scored_episodes_in_their_order():
    advantages = build("above", threshold=2.0)(GROUPS)
    assert [each.by_member for each in advantages] == [{0: [-1.0], 2: [1.0]}, {}]
    assert [each.has_signal for each in advantages] == [True, False]
    samples = build_samples(advantages)
    assert [max(sample.advantages, key=abs) for sample in samples] == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too few groups", "one entry per group: a list of length 2"),
        (
            "a member too many",
            "for group 0 of task train/0 one list per scored episode: a list of length 2",
        ),
        (
            "a turn too many",
            "group 0 of task train/0, member 0, one number per turn: a list of length 1",
        ),
        ("not finite", r"nan; expected a finite number.*group 0 of task train/0, member 0"),
        ("a number", "returned 1.0; expected one entry per group"),
        ("texts", "returned '12'; expected for group 0"),
        ("a text for an episode", r"returned '1' \(str\).*group 0 of task train/0, member 0"),
        ("a set", r"returned \{1\.0\} \(set\).*group 0 of task train/0, member 0"),
        ("a dict for a group", "expected for group 0 of task train/0 one list per scored episode"),
    ],
)
def test_what_are_no_advantages_is_rejected(name, words):
    with pytest.raises(ConfigError, match=words):
        build("given", name=name)(GROUPS)


def of_numpy(groups):
    return [[np.ones(len(e.turns)) for e in group.scored] for group in groups]


def test_arrays_are_lists_of_numbers():
    first, second = build("of_numpy")(GROUPS)
    assert (first.by_member, second.by_member) == ({0: [1.0], 2: [1.0]}, {0: [1.0], 1: [1.0]})


def spoils(groups):
    for group in groups:
        group.episodes.clear()
        group.task.reset["forged"] = True
    groups.clear()
    return [None, None]


def cancels(groups):
    raise asyncio.CancelledError


def test_it_changes_nothing_of_the_groups():
    before = copy.deepcopy(GROUPS)
    build("spoils")(GROUPS)
    assert before == GROUPS


def test_what_it_raises_has_its_name():
    with pytest.raises(
        ConfigError, match=r"trainer\.advantage\.target='.*:cancels' raised Cancell"
    ):
        build("cancels")(GROUPS)


def test_options_that_it_does_not_take_are_rejected_before_the_run():
    with pytest.raises(ConfigError, match=r"trainer\.advantage\.target.* cannot be called with"):
        build("above")


def test_the_built_in_ones_are_built_from_their_keys():
    config = run_config({"trainer.advantage.scale": "none"})
    expected = step_advantages(GROUPS, baseline="group", scale="none", discount=1.0)
    assert build_advantages(config.trainer.advantage, config.reward)(GROUPS) == expected


def test_the_group_chooses_ones_own_and_keeps_no_other_keys():
    given = ["trainer/advantage=python", "trainer.advantage.target=my:ranks"]
    assert compose(["conf=smoke", *given]).config.trainer.advantage.model_dump() == {
        "type": "python",
        "target": "my:ranks",
        "options": {},
    }


def test_dynamic_sampling_has_to_know_what_a_signal_is():
    own = ["trainer/advantage=python", "trainer.advantage.target=my:ranks"]
    with pytest.raises(ConfigError, match=r"=2 with trainer\.advantage\.type=python"):
        compose(["conf=smoke", *own, "trainer.max_sampling_rounds=2"])
