"""A user's advantage function: what it receives, and what it may return."""

import pytest
from fakes import made_up_group, run_config

from openenv_pipe.algorithms.advantages import step_advantages
from openenv_pipe.algorithms.samples import build_samples
from openenv_pipe.config.compose import compose
from openenv_pipe.config.migrations import validate_older
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
}


def given(groups, *, name):
    return RETURNED[name]


def build(name, /, **options):
    own = {"type": "python", "target": f"{__name__}:{name}", "options": options}
    return build_advantages(run_config({"trainer.advantage": own}).trainer.advantage)


def test_numbers_belong_to_the_scored_episodes_in_their_order():
    advantages = build("above", threshold=2.0)(GROUPS)
    assert [each.by_member for each in advantages] == [{0: [-1.0], 2: [1.0]}, {}]
    assert [each.has_signal for each in advantages] == [True, False]
    samples = build_samples(advantages)
    assert [max(sample.advantages, key=abs) for sample in samples] == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too few groups", "one entry per group: a sequence of length 2"),
        ("a member too many", "for group 0 one list per scored episode: a sequence of length 2"),
        ("a turn too many", "group 0, member 0, one number per turn: a sequence of length 1"),
        ("not finite", r"\[nan\]; expected finite for group 0, member 0"),
        ("a number", "returned 1.0; expected one entry per group"),
    ],
)
def test_what_are_no_advantages_is_refused(name, words):
    with pytest.raises(ConfigError, match=words):
        build("given", name=name)(GROUPS)


def test_options_that_it_does_not_take_are_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"trainer\.advantage\.target.* cannot be called with"):
        build("above")


def test_the_built_in_ones_are_built_from_their_keys():
    config = run_config({"trainer.advantage.scale": "none"}).trainer.advantage
    expected = step_advantages(GROUPS, baseline="group", scale="none", discount=1.0)
    assert build_advantages(config)(GROUPS) == expected


def test_the_group_chooses_ones_own_and_keeps_no_other_keys():
    given = ["trainer/advantage=python", "trainer.advantage.target=my:ranks"]
    assert compose(["conf=smoke", *given]).config.trainer.advantage.model_dump() == {
        "type": "python",
        "target": "my:ranks",
        "options": {},
    }


def test_dynamic_sampling_has_to_know_what_a_signal_is():
    own = ["trainer/advantage=python", "trainer.advantage.target=my:ranks"]
    with pytest.raises(ConfigError, match=r"=2 with advantage\.type=python"):
        compose(["conf=smoke", *own, "trainer.max_sampling_rounds=2"])


def test_a_run_from_before_there_were_types_has_the_one_that_there_was():
    config = run_config()
    values = config.model_dump()
    del values["trainer"]["advantage"]["type"]
    assert validate_older(values) == config
