"""Numbers, texts and free mappings of a configuration: what is rejected, with the key by name."""

import math
from copy import deepcopy

import pytest

from openenv_pipe.config.compose import assign, compose, readable_errors
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.schema.plain_data import MAX_VALUES
from openenv_pipe.errors import ConfigError


@pytest.fixture(scope="module")
def saved():
    return compose(["conf=smoke"]).config.model_dump()


def rejection(saved, key, value) -> str:
    values = deepcopy(saved)
    assign(values, key, value)
    with pytest.raises(ConfigError) as caught, readable_errors():
        RunConfig.model_validate(values)
    return str(caught.value)


def contains_itself() -> dict:
    value: dict = {}
    value["again"] = [value]
    return value


def nested(depth: int):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("trainer.group_size", 10**30, "trainer.group_size=1000"),
        ("host.sessions_per_server", 100_000, "at most 10,000"),
        (
            "trainer.tasks_per_step",
            1_000_000,
            "trainer.tasks_per_step=1000000 with trainer.group_size=4",
        ),
        ("eval.samples_per_task", 1_000_000, "eval.num_tasks=4 with eval.samples_per_task=1000000"),
        ("eval.num_resamples", 10**9, "eval.num_resamples=1000000000"),
        ("eval.temperature", 1e-300, "eval.temperature: 1e-300 is between 0 and 0.01"),
        ("trainer.temperature", 1e-300, "at least 0.01"),
        ("trainer.optimizer.lr", 1e300, "at most 1,000,000,000,000"),
        ("trainer.optimizer.lr", math.nan, "trainer.optimizer.lr: nan"),
        ("env.success_reward", -math.inf, "env.success_reward: -inf"),
        ("env.step_timeout_s", -1.0, "more than 0"),
        ("env.step_timeout_s", 0.0, "more than 0"),
        ("seed", 2**63, "seed=9223372036854775808"),
        ("seed", 10**5000, "seed: a number of more than"),
        ("runs_dir", "a\0b", "runs_dir: text with the control character U+0000"),
        ("env.variables", {"A=B": "1"}, "env.variables.A=B"),
        ("env.variables", {"": "1"}, "env.variables"),
        ("env.adapter.first", "\x1b[31m", "env.adapter.first: text with the control character"),
        ("runs_dir", "\ud800", "runs_dir: text with the control character U+D800"),
        ("env.tasks.train.reset.a", [1, math.nan], "env.tasks.train.reset.a.1: nan"),
        ("env.tasks.train.reset.a", {1: 2}, "env.tasks.train.reset.a.1: the key is 1"),
        ("env.tasks.train.reset.a", {"\x9b": 2}, r"reset.a.\x9b: the key: text with the control"),
        ("env.tasks.train.reset.a", b"x", "a value of type bytes; expected text, a number"),
        ("env.tasks.train.reset.a", nested(5000), "nested more than 64 levels deep"),
        ("env.tasks.train.reset.a", contains_itself(), "nested more than 64 levels deep"),
        ("env.tasks.train.reset.a", [0] * MAX_VALUES, "more than 100,000 values"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, str) else type(value).__name__,
)
def test_a_value_without_sense_is_rejected_by_name(saved, key, value, says):
    message = rejection(saved, key, value)
    assert says in message
    assert len(message) < 400


def unbounded(schema, key=""):
    """Yield the numbers of a JSON Schema that lack a lower or an upper bound."""
    if isinstance(schema, dict):
        bounds = {name.removeprefix("exclusive").lower() for name in schema}
        is_number = schema.get("type") in ("integer", "number")
        if is_number and not {"minimum", "maximum"} <= bounds:
            yield key
        for name, each in schema.items():
            yield from unbounded(each, f"{key}/{name}")
    if isinstance(schema, list):
        for each in schema:
            yield from unbounded(each, key)


def test_every_number_has_bounds():
    assert list(unbounded(RunConfig.model_json_schema())) == []
    assert list(unbounded({"a": {"type": "integer", "minimum": 0}})) == ["/a"]


def test_what_is_nested_and_written_in_any_script_is_accepted(saved):
    values = deepcopy(saved)
    values["env"]["tasks"]["train"]["reset"]["é"] = {"深": [nested(40), "line\n\ttab"]}
    assert RunConfig.model_validate(values).model_dump() == values


def test_each_node_of_a_learner_has_as_many_devices():
    given = ["conf=smoke", "cluster=ray", "cluster.learner_nodes=2"]
    assert compose([*given, "trainer.devices=6"]).config.ranks_per_node == 3
    assert compose(["conf=smoke", "trainer.devices=6"]).config.ranks_per_node == 6
