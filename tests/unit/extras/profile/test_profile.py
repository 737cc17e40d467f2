"""`profile`: which activity a stack belongs to, the shares of the time, and the advice."""

import asyncio
import inspect
import re
import threading
from importlib import import_module
from pathlib import Path

import pytest
from fakes import run_config

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema_keys import known_keys
from openenv_pipe.extras.profile.command import CAUSES, Profiled, Share, advice
from openenv_pipe.extras.profile.recorder import (
    COROUTINE_RULES,
    MEANINGS,
    PACKAGE,
    PYTHON,
    REWARDS,
    THREAD_RULES,
    FrameRule,
    Moment,
    Recorder,
    find_label,
)
from openenv_pipe.registry import block_types, load


def moment(at_s: float, working: dict[str, str], *waited_for: str) -> Moment:
    """Return a moment in which threads, by name, are at an activity."""
    return Moment(at_s=at_s, working=working, waited_for=frozenset(waited_for))


def profiled(*moments: Moment, ended_s: float, config=None, **metrics: float) -> Profiled:
    step = {name.replace("__", "/"): value for name, value in metrics.items()}
    return Profiled(config=config or run_config(), steps=[step], moments=moments, ended_s=ended_s)


@pytest.mark.parametrize("rule", [*THREAD_RULES, *COROUTINE_RULES], ids=str)
def test_rules_name_code_that_exists(rule: FrameRule):
    if not rule.path.endswith(".py"):
        assert list(Path(PACKAGE).glob(f"{rule.path}*"))
        return
    module = import_module("openenv_pipe." + rule.path.removesuffix(".py").replace("/", "."))
    kind, _, method = rule.function.partition(".")
    assert not kind or any(
        name.startswith(method) for name, _ in inspect.getmembers(getattr(module, kind))
    )


def test_shares_by_hand():
    found = profiled(
        moment(0.0, {"torch_0": "update", "MainThread": "python"}),
        moment(1.0, {"torch_0": "update"}),
        moment(2.0, {}, "environment"),
        moment(4.0, {}),
        ended_s=5.0,
    )
    assert found.shares == {
        "update": Share(total=0.4, alone=0.2),
        "environment": Share(total=0.4, alone=0.4),
        "python": Share(total=0.2, alone=0.0),
    }
    assert found.nothing == 0.2
    assert set(found.shares) <= set(MEANINGS)


def test_each_cause_has_its_advice():
    wordle = compose(["conf=wordle"]).config
    ahead = compose(["conf=wordle", "trainer.max_staleness=1", "engine=vllm"]).config
    small = compose(["conf=wordle", "host.sessions_per_server=8", "engine.max_batch=16"]).config
    server = compose(["conf=wordle", "engine=vllm", "engine.weight_transfer=files"]).config
    busy = {"torch_0": "update"}
    cases = {
        "host.num_servers), or let": profiled(
            moment(0.0, {}, "environment"), moment(9.0, busy), ended_s=10.0, config=wordle
        ),
        "idle": profiled(moment(0.0, busy), ended_s=1.0, config=server),
        "broadcast": profiled(moment(0.0, {}, "publishing"), ended_s=1.0, config=server),
        "rewards": profiled(moment(0.0, {}, "rewards"), ended_s=1.0, config=wordle),
        "host.sessions_per_server": profiled(moment(0.0, busy), ended_s=1.0, config=small),
        "engine.max_batch=16": profiled(moment(0.0, busy), ended_s=1.0, config=small),
        "matrix rate": profiled(moment(0.0, busy), ended_s=1.0, time__mfu=0.02, config=wordle),
        "checkpoint.every": profiled(moment(0.0, {"t": "checkpoint"}), ended_s=1.0, config=wordle),
        "no group": profiled(moment(0.0, {"t": "sampling"}), ended_s=1.0, config=wordle),
        "only Python": profiled(moment(0.0, {"t": "python"}), ended_s=1.0, config=wordle),
        "on one core": profiled(
            moment(0.0, {"sampler_0": "sampling"}),
            ended_s=1.0,
            config=wordle.model_copy(update={"num_threads": 2}),
        ),
    }
    assert len(cases) >= len(CAUSES)
    for words, found in cases.items():
        assert any(words in text for text in advice(found)), words
    assert advice(profiled(moment(0.0, busy), ended_s=1.0, config=ahead, time__mfu=0.4)) == []
    keys = set(known_keys())
    named = [
        key
        for found in cases.values()
        for text in advice(found)
        for key in re.findall(r"\b(?:host|env|trainer|engine|model|judge)\.[a-z_.]*[a-z_]", text)
    ]
    assert set(named) <= keys, set(named) - keys


async def test_a_recorder_sees_threads_and_what_coroutines_wait_for():
    """Threads that wait are idle; one that computes has the label of its stack."""
    recorder = Recorder(interval_s=0.001)
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            sum(range(100))

    busy = threading.Thread(target=compute, name="busy")
    idle = threading.Thread(target=is_over.wait, name="idle")
    busy.start()
    idle.start()
    recorder.start(asyncio.get_running_loop())
    try:
        async with asyncio.timeout(60):
            while len(recorder.moments) < 5:
                await asyncio.sleep(0.001)
    finally:
        is_over.set()
        recorder.stop()
        busy.join()
        idle.join()
    assert any("busy" in each.working for each in recorder.moments)
    assert not any("idle" in each.working for each in recorder.moments)
    assert all(each.at_s <= recorder.ended_s for each in recorder.moments)
    assert {each.working["busy"] for each in recorder.moments if "busy" in each.working} == {PYTHON}


@pytest.mark.parametrize("block", block_types("reward.terms").values(), ids=lambda each: each.type)
def test_every_term_of_a_reward_counts_as_rewards(block):
    built = load(block.build)
    code = (built if inspect.isfunction(built) else built.__init__).__code__
    for rules in (THREAD_RULES, COROUTINE_RULES):
        assert find_label([code], rules) == REWARDS
