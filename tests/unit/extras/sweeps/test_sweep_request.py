"""How `train -m` reads its overrides: grids, searches, and errors."""

import pytest
from test_config_bounds import unbounded

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.sweeps.multirun import Parameter, read_request
from openenv_pipe.extras.sweeps.schema import SweepSettings
from openenv_pipe.system.resources import group_options

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", group_options("sweep"))
def test_every_sweep_composes(name):
    assert read_request(["conf=echo", f"sweep={name}", "seed=1,2"]).sweep.type == name


def test_every_number_of_a_sweep_has_bounds():
    assert list(unbounded(SweepSettings.model_json_schema())) == []


def jobs_of(*overrides):
    return [list(job) for job in read_request(overrides).jobs]


def test_a_grid_has_every_combination_once():
    assert jobs_of("conf=echo", "trainer.optimizer.lr=1e-3,3e-3", "seed=range(0,2)") == [
        ["conf=echo", "trainer.optimizer.lr=0.001", "seed=0"],
        ["conf=echo", "trainer.optimizer.lr=0.001", "seed=1"],
        ["conf=echo", "trainer.optimizer.lr=0.003", "seed=0"],
        ["conf=echo", "trainer.optimizer.lr=0.003", "seed=1"],
    ]


def test_a_glob_goes_over_experiments():
    assert jobs_of("conf=glob(ec*)") == [["conf=echo"]]
    assert jobs_of("conf=glob(word*)") == [["conf=wordle"], ["conf=wordle_qwen3"]]


@pytest.mark.parametrize(
    "line", ["env.adapter.system='a, b'", "+reward.terms.x={type: turns, weight: 1.0}", "name=a"]
)
def test_what_is_one_value_stays_as_it_was_written(line):
    assert jobs_of("conf=echo", line, "seed=0,1")[1] == ["conf=echo", line, "seed=1"]


def test_values_of_a_grid_compose():
    for job in jobs_of("conf=echo", "env.adapter.system='a, b','c'", "trainer.steps=1,2"):
        compose(job)


def test_a_search_has_bounds():
    request = read_request(
        [
            *("conf=echo", "sweep=search", "sweep.num_jobs=7"),
            *("trainer.optimizer.lr=tag(log,interval(1e-4,1e-2))", "seed=int(interval(1,9))"),
            *("trainer.group_size=range(2,9,2)", "model=tiny,hub"),
        ]
    )
    assert request.sweep.num_jobs == 7
    assert request.jobs == (("conf=echo",),)
    assert request.parameters == (
        Parameter(key="trainer.optimizer.lr", kind="real", values=(1e-4, 1e-2), log=True),
        Parameter(key="seed", kind="whole", values=(1, 9)),
        Parameter(key="trainer.group_size", kind="whole", values=(2, 8), step=2),
        Parameter(key="model", kind="choice", values=("tiny", "hub")),
    )


def test_a_range_of_all_whole_numbers_may_be_logarithmic():
    (found,) = read_request(["sweep=search", "seed=tag(log,range(1,9))"]).parameters
    assert found == Parameter(key="seed", kind="whole", values=(1, 8), step=1, log=True)


@pytest.mark.parametrize(
    ("values", "bounds", "step"),
    [
        ("range(16,3,-4)", (4, 16), 4),
        ("range(1.0,0.0,-0.25)", (0.25, 1.0), 0.25),
        ("shuffle(range(2,9,2))", (2, 8), 2),
        ("interval(5,1)", (1, 5), None),
    ],
)
def test_bounds_of_a_search_stand_in_order(values, bounds, step):
    (found,) = read_request(["sweep=search", f"seed={values}"]).parameters
    assert (found.values, found.step) == (bounds, step)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["seed=interval(0,1)"], "add sweep=search"),
        (["conf=glob(zz*)"], "matches nothing"),
        (["sweep=serch"], "did you mean search?"),
        (["sweep.num_jobs=3"], "not a key of this type"),
        (["sweep=search", "sweep.num_job=3", "seed=1,2"], "sweep.num_jobs"),
        (["sweep=search", "sweep.num_jobs=0", "seed=1,2"], "at least 1|more than 0"),
        (["sweep=search", "conf=echo"], "nothing to search"),
        (["sweep=search", "seed=range(4,4)"], r"seed=range\(4,4\)' matches nothing"),
        (["sweep=search", "seed=tag(log,range(4,17,4))"], r"seed=.*give tag\(log,interval\(4,16\)"),
        (["sweep=search", "seed=tag(log,interval(0,1))"], r"seed=.*0.0 has no logarithm"),
        (["hydra.run.dir=x"], "Hydra's own settings have no effect"),
        (["hydra/launcher=joblib"], r"hydra/launcher=joblib.*sweep\.ray\.address=auto"),
        (["seed=[1,2"], "cannot read the override"),
        (["seed=range(0,1000000000)"], r"10,001 combinations; expected at most 10,000 jobs"),
        (["seed=range(0,200)", "name=a,b", "num_threads=range(1,99)"], "39,200 combinations"),
    ],
)
def test_mistakes_are_explained(overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        read_request(overrides)


def test_a_single_run_says_what_sweeps_are_for():
    with pytest.raises(ConfigError, match="train -m"):
        compose(["conf=echo", "seed=1,2"])
    with pytest.raises(ConfigError, match="train -m"):
        compose(["conf=echo", "sweep=grid"])
