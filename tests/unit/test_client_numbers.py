"""The numbers that clients report of their episodes: every kind of number, and nothing else."""

import json
from decimal import Decimal
from fractions import Fraction

import httpx
import numpy as np
import pytest

from openenv_pipe.client import AsyncRollout, ClientError

OPENED = {"key": "a-key", "task": {}, "group": "g", "group_size": 2}


async def reported(reward, metrics=None):
    """Finish an episode, and return what the server gets."""
    received = []

    def answer(request):
        received.append(json.loads(request.content))
        return httpx.Response(200, json={"status": "answered"})

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        await AsyncRollout(http, OPENED).finish(reward, metrics)
    return received[0]


@pytest.mark.parametrize(
    "number",
    [0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), Decimal("0.5"), Fraction(1, 2)],
)
async def test_every_kind_of_number_is_reported(number):
    assert await reported(number, {"n": number}) == {"reward": 0.5, "metrics": {"n": 0.5}}


@pytest.mark.parametrize("truth", [True, np.bool_(True)])
async def test_a_truth_value_is_a_number(truth):
    assert await reported(truth) == {"reward": 1.0, "metrics": {}}


async def test_no_reward_leaves_the_decision_to_the_run():
    assert await reported(None) == {"reward": None, "metrics": {}}


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), 10**400, "0.5", [0.5], np.array([0.5]), Decimal("sNaN"), 1 + 0j],
)
async def test_what_is_no_finite_number_is_named(value):
    with pytest.raises(ClientError, match=r"^reward is .*; expected a finite number$"):
        await reported(value)
    with pytest.raises(ClientError, match=r"^moves is .*; expected a finite number$"):
        await reported(1.0, {"moves": value})
