"""The term `verifier`: an HTTP endpoint, or a function; and what happens when it fails."""

import asyncio
import gzip
import threading
from pathlib import Path
from typing import Any

import pytest
from fakes import run_config
from pydantic import ValidationError

from openenv_pipe.config.schema import RewardConfig
from openenv_pipe.config.secrets import remember_config
from openenv_pipe.errors import ConfigError, JudgeError
from openenv_pipe.rewards import Scorer
from openenv_pipe.rewards.scoring import open_scorer
from openenv_pipe.rollout.metrics import summarise_groups
from openenv_pipe.system.secrets import redact
from openenv_pipe.types import Group, Status
from tests.judged_groups import episode, group
from tests.verifier_server import VerifierServer

ENV = {"type": "env", "use": "sum", "weight": 1.0, "per_turn": False}


def http(server: VerifierServer, **fields: Any) -> dict[str, Any]:
    source = {"type": "http", "url": server.url, "headers": {}, "max_retries": 1}
    return {"source": source, **fields}


def function(name: str, **fields: Any) -> dict[str, Any]:
    options = fields.pop("options", {})
    source = {"type": "python", "target": f"{__name__}:{name}", "options": options}
    return {"source": source, **fields}


def reward_of(fields: dict[str, Any]) -> RewardConfig:
    """Return a verifier with these fields, beside the environment's reward."""
    given = {"weights": None, "gates": [], "timeout_s": 20.0, "max_concurrent": 4}
    term = {"type": "verifier", "weight": 1.0, "per_turn": False, "max_failed_share": 0.5}
    terms = {"checked": {**term, **given, **fields}, "env": ENV}
    return RewardConfig.model_validate({"terms": terms, "transforms": {}})


def score(fields: dict[str, Any], folder: Path, *groups: Group) -> None:
    config = run_config().model_copy(update={"reward": reward_of(fields)})

    async def main() -> None:
        async with open_scorer(config, folder) as scorer:
            assert scorer.reads_messages
            await asyncio.gather(*map(scorer.score, groups))
            scorer.accept(groups)

    asyncio.run(main())


@pytest.fixture
def server():
    with VerifierServer() as server:
        yield server


def values(group: Group) -> list[float | None]:
    return [each.reward_terms.get("checked") for each in group.episodes]


def three(*, third: str = "x") -> Group:
    return group(episode(0, *"bb"), episode(1, *"bx", reward=0.5), episode(2, third))


def test_an_endpoint_gets_the_whole_episode_and_its_number_is_the_value(server, tmp_path):
    judged = three()
    judged.episodes[2].status = Status.ERROR
    fields = http(server)
    fields["source"]["headers"] = {"Authorization": "Bearer open-sesame"}
    score(fields, tmp_path, judged)
    assert values(judged) == [1.0, 0.5, None]
    assert [each.reward for each in judged.episodes] == [1.0, 0.5 + 1.0, 0.0]
    body = next(each for each in server.bodies if each["turns"][1]["reply"] == "x")
    assert body["task"] == {"id": "train/0", "split": "train", "index": 0, "seed": 1, "reset": {}}
    assert (body["status"], body["success"]) == ("turn_limit", True)
    roles = [message["role"] for message in body["messages"]]
    assert roles == [*["user", "assistant"] * 2, "environment"]
    assert body["turns"][1] == {
        "reply": "x",
        "unusable": None,
        "steps": [{"action": {}, "observation": {"letter": "b"}, "reward": 0.5}],
    }
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer open-sesame"}


NUMBERS = {"style": 0.5, "right": 2.0, "safe": 0.5}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 3.0),
        ({"gates": ["safe"]}, 2.5 * 0.5),
        ({"weights": {"right": 2.0}, "gates": ["safe"]}, 4.0 * 0.5),
        ({"weights": {}, "gates": ["safe", "style"]}, 0.25),
    ],
)
def test_numbers_with_names_are_weighted_and_multiplied(server, tmp_path, fields, expected):
    server.verdict = lambda episode: NUMBERS
    judged = group(episode(0, "b"))
    score(http(server, **fields), tmp_path, judged)
    assert values(judged) == [expected]
    assert judged.episodes[0].reward_terms["checked/style"] == 0.5
    assert summarise_groups([judged])["reward/checked/right"] == 2.0


def test_null_is_no_reward_and_no_0(server, tmp_path):
    server.verdict = lambda episode: None if len(episode["turns"]) == 1 else 1.0
    judged = three()
    score(http(server), tmp_path, judged)
    assert [each.is_scored for each in judged.episodes] == [True, True, False]
    assert "null" in judged.episodes[2].unscored


PACKED = gzip.compress(bytes(2**28))  # 256 MB
PASSING = {
    "429 with Retry-After": (429, "slow down", {"Retry-After": "0.1"}),
    "429 with a Retry-After that is none": (429, "slow down", {"Retry-After": "nan"}),
    "500": (500, "broken", {}),
    "half a JSON": (200, '{"right": 0.', {}),
    "words": (200, "good", {}),
    "no answer in time": None,
    "an answer that never ends": (200, "1", {"Content-Length": "100"}),
}
ENDLESS = ("no answer in time", "an answer that never ends")
LASTING = {
    "a rejection": (400, "too long", {}),
    "a text": (200, '"good"', {}),
    "a number as a text": (200, '"1.0"', {}),
    "NaN": (200, "NaN", {}),
    "infinity": (200, "-Infinity", {}),
    "a number too large": (200, "1" + "0" * 400, {}),
    "a list": (200, [1.0], {}),
    "no numbers": (200, {}, {}),
    "too many numbers": (200, {str(number): 1.0 for number in range(65)}, {}),
    "NaN among numbers": (200, '{"right": NaN}', {}),
    "numbers in numbers": (200, {"right": {"left": 1.0}}, {}),
    "a long name": (200, {"x" * 101: 1.0}, {}),
    "a long answer": (200, "1" * (2**20 + 1), {}),
    "a packed answer": (200, PACKED, {"Content-Encoding": "gzip"}),
}


@pytest.mark.parametrize("fault", PASSING)
def test_after_a_failure_that_may_pass_the_endpoint_is_asked_again(server, tmp_path, fault):
    server.faults = [PASSING[fault]]
    judged = group(episode(0, "b"))
    score(http(server, timeout_s=1.0 if fault in ENDLESS else 20.0), tmp_path, judged)
    assert values(judged) == [1.0]
    assert len(server.bodies) == 2


@pytest.mark.parametrize("fault", ["500", "no answer in time", *LASTING])
def test_a_failure_is_no_0_and_leaves_out_that_episode_only(server, tmp_path, fault):
    answer = (PASSING | LASTING)[fault]
    server.faults = [answer] * (2 if fault in PASSING else 1)
    fields = http(server, max_concurrent=1, timeout_s=1.0 if fault in ENDLESS else 20.0)
    judged = three()
    score(fields, tmp_path, judged)
    assert values(judged) == [None, 0.5, 0.0]
    assert [each.is_scored for each in judged.episodes] == [False, True, True]
    assert judged.episodes[0].unscored.startswith("reward.terms.checked: ")
    assert summarise_groups([judged])["judge/failed"] == 1


def test_answers_and_failures_are_kept_and_not_asked_for_again(server, tmp_path):
    server.faults = [(400, "too long", {})]
    first, again = three(), three()
    score(http(server, max_concurrent=1), tmp_path, first)
    assert len(server.bodies) == 3
    score(http(server, max_concurrent=1), tmp_path, again)
    assert len(server.bodies) == 3
    assert again == first


def test_equal_episodes_are_sent_once(server, tmp_path):
    judged = group(*(episode(member, "b") for member in range(4)))
    score(http(server), tmp_path, judged)
    assert (values(judged), len(server.bodies)) == ([1.0] * 4, 1)


def test_a_header_sets_answers_apart_unless_it_is_a_key(server, tmp_path):
    """A service may choose by a header what it measures; a key may be renewed."""
    found = []
    server.verdict = lambda body: len(server.bodies)
    for headers in ({"X-Grader": "a"}, {"X-Grader": "b"}, {"X-Grader": "b", "Authorization": "c"}):
        judged, fields = group(episode(0, "b")), http(server)
        fields["source"]["headers"] = headers
        score(fields, tmp_path, judged)
        found += values(judged)
    assert found == [1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("weight", "faults", "cause"),
    [
        (1.0, [(400, "too long", {})] * 2, r"2 of 3 .*checked\.max_failed_share=0\.5.*too l"),
        (0.0, [(400, "too long", {})] * 2, r"2 of 3 .*checked\.max_failed_share=0\.5.*too l"),
        (1.0, [(200, '"yes"', {})] * 3, r"3 of 3 episodes.*yes"),
    ],
    ids=["rejections", "of a metric", "answers that cannot be read"],
)
def test_above_the_limit_the_run_ends_and_asks_again_later(server, tmp_path, weight, faults, cause):
    server.faults = list(faults)
    fields = http(server, max_concurrent=1, weight=weight)
    with pytest.raises(JudgeError, match=cause):
        score(fields, tmp_path, three())
    judged = three()
    score(fields, tmp_path, judged)
    assert values(judged) == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("status", [300, 302, 303, 308, 401, 404])
def test_a_wrong_address_or_key_ends_the_run_at_once(server, tmp_path, status):
    server.faults = [(status, "no", {"Location": "http://127.0.0.1:1/elsewhere"})]
    with pytest.raises(ConfigError, match=rf"{status}.*reward\.terms\.checked\.source\.url"):
        score(http(server), tmp_path, group(episode(0, "b")))
    assert len(server.bodies) == 1


def test_a_failure_shows_no_secret(server, tmp_path):
    """An endpoint repeats a header."""
    server.faults = [(400, "not Bearer hunter-two", {})]
    fields = http(server)
    fields["source"]["headers"] = {"Authorization": "Bearer hunter-two"}
    judged = three()
    remember_config({"reward": {"terms": {"checked": fields}}})  # as of every configuration
    score(fields, tmp_path, judged)
    texts = [redact(each.unscored or "") for each in judged.episodes]
    texts += [path.read_text() for path in tmp_path.rglob("*.json")]
    assert "400" in "".join(texts) and len(texts) == 6
    assert not [text for text in texts if "hunter" in text]


async def slow_share(episode, *, letter):
    await asyncio.sleep(0)
    return {"share": sum(turn.reply == letter for turn in episode.turns) / len(episode.turns)}


def number_or_nothing(episode):
    return None if episode.member else 2.0


def right(episode):
    return episode.member == 1


def fails(episode, *, how):
    """Block the thread, as a synchronous request to a server that does not answer, or raise."""
    if episode.member == 1 and how == "blocks":
        threading.Event().wait(3600)
    if episode.member == 1:
        raise {"raises": LookupError("no such episode"), "exits": SystemExit(0)}[how]
    return 1.0


async def fails_later(episode, *, how):
    if episode.member == 1 and how == "hangs":
        await asyncio.sleep(3600)
    if episode.member == 1:
        raise asyncio.CancelledError
    return 1.0


def without_episode():
    return 1.0


FAILED = [1.0, None, 1.0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (function("slow_share", options={"letter": "b"}), [1.0, 0.5, 0.0]),
        (function("number_or_nothing", max_failed_share=1.0), [2.0, None, None]),
        (function("fails_later", options={"how": "hangs"}, timeout_s=0.2), FAILED),
        (function("fails", options={"how": "raises"}), FAILED),
        (function("right"), [0.0, 1.0, 0.0]),
        (function("fails_later", options={"how": "gives up"}), FAILED),
        (function("fails", options={"how": "exits"}), FAILED),
        (function("fails", options={"how": "blocks"}, timeout_s=0.2), FAILED),
    ],
    ids=[
        *("asynchronous", "None", "hangs", "raises", "a bool", "CancelledError", "SystemExit"),
        "blocks its thread",
    ],
)
def test_a_function_gets_the_episode_and_its_failure_is_no_0(tmp_path, fields, expected):
    judged = three()
    score(fields, tmp_path, judged)
    assert values(judged) == expected
    assert [each.is_scored for each in judged.episodes] == [each is not None for each in expected]


def test_a_function_that_takes_no_episode_is_rejected_at_the_start():
    with pytest.raises(ConfigError, match=r"reward\.terms\.checked\.source\.target"):
        Scorer(reward_of(function("without_episode")), 1.0)


@pytest.mark.parametrize(
    ("url", "expected"),
    [("http://verifier.example/x", "without encryption"), ("ftp://127.0.0.1/x", "url")],
)
def test_a_term_that_cannot_work_is_rejected(url, expected):
    source = {"type": "http", "url": url, "headers": {}, "max_retries": 1}
    with pytest.raises(ValidationError, match=expected):
        reward_of({"source": source})
