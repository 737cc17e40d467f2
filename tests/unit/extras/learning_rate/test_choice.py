"""`openenv-pipe lr`: what trials measure, the rate that follows, and what is rejected before."""

import math
from statistics import fmean, pstdev, stdev

import pytest

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.learning_rate.choice import Mean, Trial, choose
from openenv_pipe.extras.learning_rate.request import read_request

pytestmark = pytest.mark.slow


def records(*rewards, std=0.4, episodes=64, **others):
    """Return steps with these mean rewards."""
    return [
        {
            "stage": "grpo",
            "step": step,
            "reward/mean": reward,
            "reward/std": std,
            "episodes/count": episodes,
            "episodes/failed": 0,
            "groups/trained": 8,
            "groups/skipped": 0,
            "sampling/entropy": 1.0,
            **others,
        }
        for step, reward in enumerate(rewards, 1)
    ]


def trial(lr, *rewards, failure=None, **others):
    return Trial.of(
        lr, "echo_lr/0001", records(*rewards, **others), max_mismatch=0.02, failure=failure
    )


def rising(lr, to):
    """Return a trial of twelve steps whose reward begins at 0.2."""
    return trial(lr, *([0.2] * 4 + [(0.2 + to) / 2] * 4 + [to] * 4))


def test_the_mean_and_its_error_are_those_of_the_single_episodes():
    rewards = [[0.0, 1.0, 1.0], [0.25, 0.75, 0.5, 0.5, 1.0]]
    steps = [
        {
            "reward/mean": fmean(each),
            "reward/std": pstdev(each),
            "episodes/count": len(each) + 2,
            "episodes/failed": 1,
            "judge/failed": 1,
        }
        for each in rewards
    ]
    every = [reward for each in rewards for reward in each]
    found = Mean.of([*steps, {"episodes/count": 8, "episodes/failed": 8}])
    assert found.value == pytest.approx(fmean(every))
    assert found.error == pytest.approx(stdev(every) / math.sqrt(len(every)))
    assert Mean.of(steps[:0]) is None


def test_a_trial_compares_its_thirds():
    found = trial(
        1e-3, 0.1, 0.2, 0.3, 0.9, 0.9, 0.9, 0.5, 0.6, **{"grad/norm": 2.0, "kl/start": 0.5}
    )
    assert (found.first.value, found.last.value) == pytest.approx((0.15, 0.55))
    assert (found.grad_norm, found.kl, found.success, found.is_sound) == (2.0, 0.5, None, True)


def test_the_rate_at_which_the_reward_rises_the_most_is_chosen():
    choice = choose([rising(1e-4, 0.25), rising(3e-4, 0.8), rising(1e-3, 0.5)])
    assert choice.lr == 3e-4
    assert choice.why == "at 0.0003 the reward rises the most, from 0.2 to 0.8, without an alarm"


def test_of_rates_that_are_equally_good_the_largest_is_chosen():
    choice = choose([rising(1e-4, 0.2), rising(3e-4, 0.8), rising(1e-3, 0.79), rising(3e-3, 0.3)])
    assert choice.lr == 1e-3
    assert "within a standard error of the highest reward (0.8, at 0.0003)" in choice.why


@pytest.mark.parametrize(
    ("best", "word"), [(0, "smallest"), (1, None), (2, "largest")], ids=["low", "between", "high"]
)
def test_a_rate_at_the_edge_is_said_to_be_there(best, word):
    trials = [rising(lr, 0.8 if index == best else 0.3) for index, lr in enumerate((1, 2, 3))]
    choice = choose(trials)
    assert choice.lr == best + 1
    assert ("that was tried" in choice.why) == (word is not None)
    assert word is None or f"it is the {word} that was tried" in choice.why


def test_a_choice_by_steps_that_show_no_collapse_says_so():
    flat, risen = trial(1e-4, *[0.2] * 9), trial(1e-3, *([0.2] * 6 + [0.8] * 3))
    assert "; 9 steps show no collapse, --steps 10 may" in choose([flat, risen]).why


def test_a_collapsed_rate_is_not_chosen_however_high_its_reward_was():
    """By the alarms of `trainer.guard`: of the reward, and of the entropy."""
    fallen = trial(1e-2, *([0.2, 0.6, 0.9, 0.9, 0.9, 0.9, 0.9] + [0.5] * 5))
    assert "The reward has fallen from" in fallen.collapses[0]
    certain = records(*[0.5] * 10)
    for record in certain[5:]:
        record["sampling/entropy"] = 0.01
    certain = Trial.of(3e-3, "echo_lr/0002", certain, max_mismatch=0.02, failure=None)
    assert "The entropy has collapsed" in certain.collapses[0]
    choice = choose([rising(1e-4, 0.2), rising(3e-4, 0.5), certain, fallen])
    assert choice.lr == 3e-4
    assert "that was tried" not in choice.why  # larger ones were, too
    choice = choose([certain, fallen])
    assert choice.lr is None
    assert "try rates below 0.003" in choice.why


def test_a_rate_that_breaks_the_training_is_not_chosen():
    broken = trial(1.0, 0.9, failure="TrainingError: the gradient's norm is nan")
    nothing = trial(2.0, failure="TrainingError: 3 of 9 sampled logprobs are not finite")
    assert choose([rising(1e-4, 0.2), rising(3e-4, 0.5), broken, nothing]).lr == 3e-4
    assert choose([broken, nothing]).lr is None


def test_rates_that_differ_by_noise_give_no_choice():
    """Also if the reward rises at all of them."""
    for rewards in ((0.2, 0.21, 0.24), (0.7, 0.72, 0.75)):
        choice = choose([rising(10**-index, to) for index, to in enumerate(rewards)])
        assert choice.lr is None
        assert choice.why.startswith("no choice: the rewards of 3 rates")
    without_reward = [trial(lr, *[0.0] * 9, std=0.0) for lr in (1e-4, 1e-3)]
    assert choose(without_reward).lr is None


def test_a_reward_that_rises_nowhere_gives_no_choice():
    falling = trial(1e-3, *([0.5] * 3 + [0.4] * 3 + [0.1] * 3))
    flat = trial(1e-4, *[0.5] * 9)
    choice = choose([flat, falling])
    assert choice.lr is None
    assert "at the best rate, 0.0001, the reward does not rise beyond noise" in choice.why


def test_by_default_five_rates_lie_around_that_of_the_configuration():
    """The steps go on after the warm-up of the rate, and end with the run's."""
    request = read_request(["conf=sums"], None, None)
    assert list(request.trials) == [1.1e-06, 3.3e-06, 1e-05, 3e-05, 9e-05]
    assert request.num_steps == 15
    assert request.costs.startswith("5 learning rates x 15 steps of 8 x 8 episodes")
    assert (request.config.name, request.config.trainer.guard) == ("sums_lr", "warn")
    assert request.trials[3e-5].config.trainer.optimizer.lr == 3e-5
    assert read_request(["conf=sums", "trainer.steps=8"], None, None).num_steps == 8


def test_too_few_steps_are_named_and_tried_all_the_same():
    request = read_request(["conf=sums"], "2e-6,1e-6", 4)
    assert (list(request.trials), request.num_steps) == ([1e-6, 2e-6], 4)
    warmup, guard = request.doubts
    assert "trainer.optimizer.lr_warmup_steps=5" in warmup and "--steps 15" in warmup
    assert "a collapse is seen from 10 steps on, but only 4 are taken" in guard
    assert read_request(["conf=echo"], None, None).doubts == []


@pytest.mark.parametrize(
    ("overrides", "rates", "num_steps", "expected"),
    [
        ([], "a,b", None, "--rates 'a,b': expected at least two different numbers"),
        ([], "1e-5", None, "--rates '1e-5'"),
        ([], "1e-5,1e-5", None, "at least two different"),
        ([], "1e-5,0", None, "above 0"),
        ([], "1e-5,nan", None, "above 0"),
        ([], "1e-5,inf", None, "above 0"),
        ([], "", None, "--rates ''"),
        ([], "1e-5,1e30", None, "trainer.optimizer.lr=1e+30: expected a number"),
        (["trainer.steps=0"], None, None, "trainer.steps=0"),
        (["trainer.steps=1"], None, None, "trainer.steps=1: "),
        ([], None, 81, "--steps 81 is more than trainer.steps=80"),
        (["agent=client", "host=none"], None, None, "agent=client: "),
        (["trainer.optimizer.lr=1e-4,1e-3"], None, None, "gives several values"),
    ],
)
def test_what_cannot_be_searched_is_rejected(overrides, rates, num_steps, expected):
    with pytest.raises(ConfigError) as error:
        read_request(["conf=echo", *overrides], rates, num_steps)
    assert expected in str(error.value)


def test_a_rise_between_thirds_of_few_tasks_is_noise():
    """The episodes of a task are alike, so eight times as many say no more about other tasks."""
    few = [{"groups/trained": 1, "episodes/count": 64}, {"groups/trained": 8, "episodes/count": 64}]
    assert [trial(1e-3, *[0.2] * 4, *[0.5] * 8, **each).rises for each in few] == [False, True]
