"""What vLLM servers answer is checked once, and each fault is an error."""

import asyncio
import copy
import json
import math

import pytest

from openenv_pipe.engines import TokenRequest
from openenv_pipe.engines.vllm.answers import (
    Models,
    RpcResults,
    ServerGoneError,
    ServerInfo,
    WorldSize,
    parse,
    read_completions,
    read_next_logprobs,
)
from openenv_pipe.engines.vllm.replica import MAX_TRIES
from openenv_pipe.engines.vllm.server_metrics import read_metrics
from openenv_pipe.errors import EngineError
from tests.unit.test_vllm_replicas import two_servers

PROMPT, MODEL, VOCABULARY = [1, 2, 3], "base", 32
SAMPLING = {"n": 2, "max_tokens": 3, "temperature": 1.0}


def choice(index, ids=(7, 8, 9), finish="length", **changes):
    return {
        "index": index,
        "finish_reason": finish,
        "token_ids": list(ids),
        "logprobs": {"content": [{"token_id": id, "logprob": -0.5} for id in ids]},
        "weight_versions": [{"version": "run 1", "start": 0, "end": len(ids)}],
        **changes,
    }


def logprobs(*values, ids=(7, 8, 9)):
    entries = zip(ids, values, strict=False)
    return {"content": [{"token_id": id, "logprob": value} for id, value in entries]}


def answer(*choices, **changes):
    return {"model": MODEL, "choices": list(choices), **changes}


def read(content, vocabulary_size=VOCABULARY):
    if not isinstance(content, bytes):
        content = json.dumps(content).encode()
    return read_completions(
        content,
        "http://a:1",
        model=MODEL,
        prompt=PROMPT,
        sampling=SAMPLING,
        vocabulary_size=vocabulary_size,
    )


GOOD = answer(choice(0), choice(1, (7, 8), "stop"))
WHOLE = json.dumps(GOOD).encode()
GIVEN_UP = {"token_ids": None, "logprobs": None, "weight_versions": None}


def with_choice(**changes):
    return answer(choice(0, **changes), choice(1))


REJECTED = {
    "half of the JSON": (WHOLE[:60], ServerGoneError, "not complete JSON"),
    "nothing": (b"", ServerGoneError, "not complete JSON"),
    "a page of a proxy": (b"<html>busy</html>", ServerGoneError, "not complete JSON.*busy"),
    "an error with status 200": (
        {"error": {"message": "overloaded"}},
        ServerGoneError,
        "an error.*overloaded",
    ),
    "an error beside choices": ({**GOOD, "error": "overloaded"}, ServerGoneError, "an error"),
    "no object": ([GOOD], EngineError, "at the answer: .*object"),
    "no choices": ({"model": MODEL}, EngineError, "choices: Field required"),
    "null choices": (answer() | {"choices": None}, EngineError, "at choices: .*array"),
    "another model": (answer(choice(0), choice(1)) | {"model": "x"}, EngineError, "model 'x'"),
    "another prompt": (GOOD | {"prompt_token_ids": [1, 2]}, EngineError, "prompt of 2 token ids"),
    "fewer choices": (answer(choice(0)), EngineError, r"indices '\[0\]', expected 0 to 1"),
    "more choices": (answer(*map(choice, range(3))), EngineError, "indices"),
    "a choice twice": (answer(choice(0), choice(0)), EngineError, r"indices '\[0, 0\]'"),
    "abort": (with_choice(finish="abort", **GIVEN_UP), ServerGoneError, "finish_reason abort"),
    "abort amid it": (with_choice(ids=(7,), finish="abort"), ServerGoneError, "abort"),
    "error": (with_choice(finish="error", **GIVEN_UP), ServerGoneError, "finish_reason error"),
    "an unknown end": (with_choice(finish="repetition"), EngineError, "'repetition'"),
    "no end": (with_choice(finish=None), EngineError, "finish_reason None"),
    "no ids": (with_choice(token_ids=None), EngineError, "0 tokens, expected 1 to 3"),
    "an empty reply": (with_choice(ids=(), finish="stop"), EngineError, "0 tokens"),
    "more tokens than asked": (with_choice(ids=(7, 8, 9, 7)), EngineError, "4 tokens"),
    "a silent cut": (with_choice(ids=(7, 8)), EngineError, "cut after 2 of 3.*max-model-len"),
    "a null id": (with_choice(token_ids=[7, None, 9]), EngineError, r"token_ids\.1: .*integer"),
    "an id as text": (with_choice(token_ids=[7, "8", 9]), EngineError, r"token_ids\.1"),
    "an id that is true": (with_choice(token_ids=[7, True, 9]), EngineError, r"token_ids\.1"),
    "an id above": (with_choice(ids=(7, 32, 9)), EngineError, "token 32 is not in the vocab"),
    "an id below 0": (with_choice(ids=(7, -1, 9)), EngineError, "token -1 is not in the vocab"),
    "no logprobs": (with_choice(logprobs=None), EngineError, "3 tokens and 0 logprobs"),
    "fewer logprobs": (with_choice(logprobs=logprobs(-1, -1)), EngineError, "3 tokens and 2"),
    "a null logprob": (with_choice(logprobs=logprobs(-1, None, -1)), EngineError, r"1\.logprob"),
    "NaN": (with_choice(logprobs=logprobs(-1, math.nan, -1)), EngineError, "finite"),
    "vLLM's NaN": (with_choice(logprobs=logprobs(-1, -9999.0, -1)), EngineError, "-9999"),
    "a positive one": (with_choice(logprobs=logprobs(-1, 0.5, -1)), EngineError, "8 is 0.5"),
    "those of others": (
        with_choice(logprobs=logprobs(-1, -1, -1, ids=(7, 9, 8))),
        EngineError,
        "token 8 was sampled, and the logprob is that of 9",
    ),
    "no versions": (with_choice(weight_versions=None), EngineError, "weight versions"),
    "versions of a part": (
        with_choice(weight_versions=[{"version": "run 1", "start": 0, "end": 2}]),
        EngineError,
        "do not cover its 3 tokens",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_an_answer_that_contradicts_its_request_is_rejected(name):
    content, kind, message = REJECTED[name]
    with pytest.raises(kind, match=rf"^http://a:1 .*{message}"):
        read(content)


def test_choices_in_any_order_are_put_in_the_order_of_their_numbers():
    first, second = read(answer(*reversed(GOOD["choices"])))
    assert (first.token_ids, second.token_ids) == ([7, 8, 9], [7, 8])
    assert first.labels == ["run 1"]


@pytest.mark.parametrize(
    "logprob", [0.0, 1e-6, -9998.0], ids=["certain", "rounded", "nearly impossible"]
)
def test_extreme_logprobs_are_no_faults(logprob):
    assert read(with_choice(logprobs=logprobs(-1, logprob, -1)))[0].logprobs[1] == logprob


def test_ids_of_an_unknown_vocabulary_are_not_compared():
    assert read(with_choice(ids=(7, 10**6, 9)), None)[0].token_ids[1] == 10**6


def test_every_prefix_of_an_answer_is_an_error_and_no_traceback():
    for end in range(len(WHOLE)):
        with pytest.raises(ServerGoneError):
            read(WHOLE[:end])


def test_every_value_replaced_by_another_type_is_an_error_or_changes_nothing():
    expected = read(GOOD)

    def places(value, path=()):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield (*path, key)
            if isinstance(inner, dict | list):
                yield from places(inner, (*path, key))

    def damaged(path, new):
        inner = whole = copy.deepcopy(GOOD)
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = new
        return whole

    num_accepted = 0
    for path in places(GOOD):
        for new in (None, True, "x", -1, 1.5, [], {}, [None], {"token_id": "y"}):
            try:
                found = read(damaged(path, new))
            except (EngineError, ServerGoneError):
                continue
            num_accepted += 1  # such as a label of other weights, or another logprob
            ids = [each.token_ids for each in found]
            assert ids == [each.token_ids for each in expected], (path, new)
    assert num_accepted < 40


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"choices": []}', "choices"),
        (b'{"choices": [{"logprobs": {"content": []}}]}', "logprobs of 0 tokens"),
        (b'{"choices": [{"logprobs": null}]}', r"choices\.0\.logprobs"),
        (
            b'{"choices": [{"logprobs": {"content": [{"token_id": 1, "logprob": 0}]}}]}',
            "no logprob of token 5",
        ),
    ],
)
def test_a_logprob_check_without_its_logprobs_is_an_error(content, message):
    with pytest.raises(EngineError, match=message):
        read_next_logprobs(content, "http://a:1", [5])


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (Models, b'{"data": [{"id": null}]}'),
        (Models, b'{"data": {"id": "base"}}'),
        (RpcResults, b'{"results": [null]}'),
        (RpcResults, b'{"results": []}'),
        (WorldSize, b'{"world_size": "1"}'),
        (WorldSize, b"[]"),
        (ServerInfo, b'{"vllm_config": "text"}'),
    ],
)
def test_other_endpoints_are_read_as_strictly(kind, content):
    with pytest.raises(EngineError, match="JSON of an unexpected form"):
        parse(kind, content, "http://a:1")


def test_metrics_that_are_no_numbers_are_left_out():
    text = 'vllm:a 1.5\nvllm:b NaN\nvllm:c 1.2.3\nvllm:d{x="y"} 2e+03\nvllm:e\n'
    assert read_metrics(text) == {"a": 1.5, "d": 2000.0}


def request() -> TokenRequest:
    return TokenRequest(episode=0, turn=0, prompt_ids=[1], max_tokens=2, temperature=1.0, seed=1)


@pytest.mark.parametrize("num_faults", [MAX_TRIES - 1, MAX_TRIES])
async def test_what_may_pass_is_asked_again_within_the_budget(tmp_path, num_faults):
    async with two_servers(tmp_path) as (engine, servers, *_):
        remaining = num_faults

        def spoil(given):
            nonlocal remaining
            remaining -= 1
            return json.dumps(given).encode()[:40] if remaining >= 0 else None

        for server in servers:
            server.spoil = spoil
        asking = engine.generate(request())
        if num_faults < MAX_TRIES:
            assert (await asking).token_ids == [7, 8]
        else:
            with pytest.raises(EngineError, match="4 requests in a row got no usable answer"):
                await asking


async def test_what_does_not_pass_ends_the_request_at_once(tmp_path):
    async with two_servers(tmp_path) as (engine, servers, *_):
        num_asked = len(servers[0].prompts) + len(servers[1].prompts)

        def spoil(given):
            given["choices"][0]["token_ids"][0] = 32

        for server in servers:
            server.spoil = spoil
        with pytest.raises(EngineError, match="token 32 is not in the vocabulary of 32 tokens"):
            await asyncio.wait_for(engine.generate(request()), 60)
        assert len(servers[0].prompts) + len(servers[1].prompts) == num_asked + 1
