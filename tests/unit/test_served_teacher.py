"""A teacher on a vLLM server: its logprobs come with the samples.

`tests/integration/test_vllm_serve.py` asks a real server.
"""

import asyncio

import pytest
import torch
from aiohttp import web
from fakes import loss_and_gradients, random_samples, run_config, tiny_policy
from stub_server import answering

from openenv_pipe.errors import ConfigError, EngineError
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.pipeline.served_teacher import API_KEY, check_teachers, served_teachers

KL = {"coef": 1.0, "estimator": "k2", "importance_weights": False}
TOKENIZER = build_tokenizer()
MODELS = {"data": [{"id": "teacher", "max_model_len": 4096}]}


def settings(url):
    given = {f"trainer.loss.kl.{key}": value for key, value in KL.items()}
    return run_config({**given, "trainer.loss.kl.reference": url, "trainer.loss.policy_coef": 0.0})


def asked(story, models=MODELS, completion=None, text=None, status=200):
    """Return what `story(url)` returns, which is called beside a server with these answers.

    completion: the logprobs of a prompt's tokens; text: those of token ids
    """
    requests = []

    async def answer(request):
        body = await request.json() if request.can_read_body else None
        requests.append((request.path, request.headers.get("Authorization"), body))
        if request.path == "/v1/models":
            return web.json_response(models, status=status)
        if request.path == "/detokenize":
            return web.json_response({"prompt": text(body["tokens"])})
        return web.json_response({"choices": [{"prompt_logprobs": completion(body["prompt"])}]})

    async def main():
        async with answering(answer) as url:
            return await story(f"{url}/v1")

    return asyncio.run(main()), requests


def score(samples, completion):
    async def story(url):
        (teacher,) = await served_teachers(settings(url), TOKENIZER)
        await teacher.score(samples)

    return asked(story, completion=completion, text=TOKENIZER.decode)[1]


def of_each(ids):
    """Return logprobs that follow from the tokens, as the server writes them."""
    return [None, *({str(each): {"logprob": -each / 100, "rank": 1}} for each in ids[1:])]


def test_each_sample_gets_the_logprobs_of_its_tokens(monkeypatch):
    monkeypatch.setenv(API_KEY, "a-key")
    samples = random_samples(0)
    samples[0].loss_mask = [False] * len(samples[0].loss_mask)
    requests = score(samples, of_each)
    assert samples[0].reference_logprobs is None, "nothing of it is trained on"
    for sample in samples[1:]:
        assert sample.reference_logprobs == [0.0, *(-each / 100 for each in sample.token_ids[1:])]
    assert all(key == "Bearer a-key" for _, key, _ in requests)
    bodies = [body for path, _, body in requests if path == "/v1/completions"]
    assert len(bodies) == len(samples) - 1
    assert {(each["temperature"], each["prompt_logprobs"]) for each in bodies} == {(1.0, 0)}


def test_the_gradient_is_that_of_a_teacher_on_this_machine():
    changes = {"temperature": 1.0, "loss.policy_coef": 0.0, "loss.normalise": "token"}
    changes |= {f"loss.kl.{key}": value for key, value in KL.items()}
    teacher = tiny_policy()
    with torch.no_grad():
        teacher.model.get_input_embeddings().weight += 0.1
    local = tiny_policy()
    local.teachers[""] = teacher
    expected = loss_and_gradients(local, random_samples(0), changes)
    samples = random_samples(0)
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(teacher.model(input_ids=ids).logits[0, :-1], dim=-1)
        chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        sample.reference_logprobs = [0.0, *chosen.tolist()]
    changes["loss.kl.reference"] = "http://127.0.0.1:1/v1"
    found = loss_and_gradients(tiny_policy(), samples, changes)
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(found[1], expected[1], strict=True))
    assert any(gradient.abs().max() > 1e-3 for gradient in found[1])


@pytest.mark.parametrize(
    "completion",
    [
        lambda ids: of_each(ids)[:-1],
        lambda ids: of_each([0, *ids[:-1]]),
        lambda ids: [None] * len(ids),
        lambda ids: None,
    ],
)
def test_an_answer_about_other_tokens_is_rejected(completion):
    with pytest.raises(EngineError, match="did not return a logprob"):
        score(random_samples(0)[:1], completion)


@pytest.mark.parametrize(
    ("models", "status", "name", "expected"),
    [
        (
            {"data": [{"id": "a"}, {"id": "b"}]},
            200,
            "",
            r"more than one.*a, b; name one, such as .*#a",
        ),
        ({"data": [{"id": "a"}]}, 200, "#b", "names no model of the server, which has a"),
        ({"data": [{"id": "a", "max_model_len": 64}]}, 200, "", "larger --max-model-len"),
        ({"data": []}, 200, "", "not in vLLM's format"),
        ({}, 401, "", f"status 401.*set {API_KEY}"),
    ],
)
def test_a_server_that_cannot_teach_is_named(models, status, name, expected):
    async def story(url):
        return await served_teachers(settings(url + name), TOKENIZER)

    with pytest.raises(ConfigError, match=expected):
        asked(story, models, status=status)


def test_a_server_that_is_not_there():
    with pytest.raises(ConfigError, match="expected a vLLM server that is running"):
        check_teachers(settings("http://127.0.0.1:1/v1"))


def test_its_vocabulary_is_compared():
    decode = TOKENIZER.decode

    async def story(url):
        return await asyncio.to_thread(check_teachers, settings(url))

    assert "its vocabulary is the policy's" in asked(story, text=decode)[0]
    with pytest.raises(ConfigError, match="another vocabulary"):
        asked(story, text=lambda ids: decode(ids[:-1]))
