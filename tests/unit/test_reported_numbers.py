"""Numbers in observations, named by the path of their field."""

import pytest
from fakes import made_up_episode, made_up_turn

from openenv_pipe.rewards.reported_numbers import (
    MAX_SCORES,
    last_number,
    last_rubric_scores,
    number_at,
    rubric_scores,
    summarise_reported,
)
from openenv_pipe.types import Group, Observation, Status, Step, Task

OBSERVATION = {
    "score": 3,
    "legal": True,
    "text": "7",
    "endless": float("inf"),
    "nothing": float("nan"),
    "huge": 10**400,
    "cells": [[1, 2], [3, 4.5]],
    "a": {"b": 1, "c.d": 2},
    "a.b": 5,
    "metadata": {"rubric_scores": {"style": 0.5, "total.sum": 1, "parts": {"first": False}}},
}


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("score", 3.0),
        ("legal", 1.0),
        ("cells.1.1", 4.5),
        ("a.c.d", 2.0),
        ("a.b", 5.0),  # the longer name first
        ("metadata.rubric_scores.style", 0.5),
        ("metadata.rubric_scores.total.sum", 1.0),
        *((path, None) for path in ("text", "endless", "nothing", "huge", "cells", "a", "absent")),
        *((path, None) for path in ("", "cells.2", "cells.-1", "cells.99999999999", "score.x")),
    ],
)
def test_a_path_names_a_number(path: str, number: float | None) -> None:
    assert number_at(OBSERVATION, path) == number


def test_rubric_scores_are_named_by_their_dotted_paths() -> None:
    assert rubric_scores(OBSERVATION) == {"style": 0.5, "total.sum": 1.0, "parts.first": 0.0}


@pytest.mark.parametrize("scores", [None, 3, "high", [1, 2], {"word": "high"}, {}])
def test_rubric_scores_that_are_none_are_left_out(scores: object) -> None:
    assert rubric_scores({"metadata": {"rubric_scores": scores}}) == {}
    assert rubric_scores({"metadata": None}) == {}


def test_the_latest_value_of_an_episode_counts() -> None:
    observations = [{"score": 1}, {"score": 2}, {}, {"score": None}]
    assert last_number(observations, "score") == 2.0
    assert last_number([{}], "score") is None
    scored = [{"metadata": {"rubric_scores": each}} for each in ({"a": 1, "b": 1}, {"a": 0}, {})]
    assert last_rubric_scores(scored) == {"a": 0.0, "b": 1.0}


def group_of(*observations: Observation, failed: int | None = None) -> Group:
    """One episode of one turn for each observation."""
    episodes = []
    for member, seen in enumerate(observations):
        turn = made_up_turn([5], [6], steps=[Step(action={}, observation=seen)])
        status = Status.ERROR if member == failed else Status.DONE
        episodes.append(made_up_episode(member=member, turns=[turn], status=status))
    return Group(id="0", task=Task(id="train/0", split="train", index=0, seed=0), episodes=episodes)


def test_fields_become_metrics_and_rubrics_by_themselves() -> None:
    group = group_of(
        {"score": 1, "metadata": {"rubric_scores": {"style": 0.5}}},
        {"score": 2, "metadata": {"rubric_scores": {"style": 1.0, "right": True}}},
        {"text": "no score"},
        {"score": 99, "metadata": {"rubric_scores": {"style": 99}}},
        failed=3,
    )
    fields = {"food": "score", "none": "absent.field"}
    expected = {"env/food": 1.5, "rubric/right": 1.0, "rubric/style": 0.75}
    assert summarise_reported([group], fields) == expected
    assert summarise_reported([], fields) == {}


def test_what_clients_report_becomes_metrics() -> None:
    group = group_of(
        {"reported": {"reward": 1.0, "metrics": {"called": 1, "moves": 4}}},
        {"reported": {"reward": None, "metrics": {"called": 0, "bad\nname": 3}}},
        {"text": "of the environment", "reported": {"metrics": {"called": 9}}},
        {"reported": {"reward": 1.0, "metrics": {"called": 99}}},
        failed=3,
    )
    assert summarise_reported([group], {}) == {"reported/called": 0.5, "reported/moves": 4.0}
    many = [{"reported": {"metrics": {f"{n}/{m}": 1.0 for m in range(40)}}} for n in range(9)]
    assert len(summarise_reported([group_of(*many)], {})) == MAX_SCORES


def test_names_of_rubrics_that_are_no_names_become_no_metrics() -> None:
    names = ["good", "a\x1b[2J", "x" * 500, "two\nlines"]
    group = group_of({"metadata": {"rubric_scores": dict.fromkeys(names, 1.0)}})
    assert summarise_reported([group], {}) == {"rubric/good": 1.0}
    many = [{"metadata": {"rubric_scores": {f"{n}/{m}": 1.0 for m in range(40)}}} for n in range(9)]
    assert len(summarise_reported([group_of(*many)], {})) == MAX_SCORES
