"""What a checkpoint says of an episode's tokens: logprobs, alternatives, the KL from the start."""

import asyncio
import subprocess
import sys

import fakes
import pytest
import torch
from starlette.testclient import TestClient

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.viewer.score_tokens import answer
from openenv_pipe.extras.viewer.web import scoring, server
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.extras.viewer.web.scoring import TokenScorer
from openenv_pipe.learner.checkpoint import save_weights
from openenv_pipe.runs.checkpoints import StageStep, new_checkpoint
from openenv_pipe.runs.episodes import episodes_path, write_episodes
from openenv_pipe.runs.folder import RunFolder

OWN = {"Origin": "http://127.0.0.1:8090", "Content-Type": "application/json"}
HEAT = 0.7
WAITS = "import signal, sys; sys.stdin.readline(); signal.alarm(1); signal.pause()"


@pytest.fixture(params=[0, 2], ids=["full", "adapter"])
def run(request, tmp_path):
    """A run whose step 4 was played by its checkpoint of step 3, and that policy."""
    model = fakes.tiny_model(lora_rank=request.param).model_dump()
    changes = {"runs_dir": str(tmp_path), "name": "fake", "seed": 0, "model": model}
    config = fakes.run_config(changes | {"trainer.temperature": HEAT})
    folder = RunFolder.create(config, overrides=[], command=[])
    policy = fakes.tiny_policy(lora_rank=request.param)
    generator = torch.Generator().manual_seed(1)
    for values in fakes.trained_tensors(policy):
        values.data += 0.1 * torch.randn(values.shape, generator=generator)
    with new_checkpoint(folder.path, StageStep("grpo", 3)) as path:
        save_weights(path, policy, steps=3, warm_start_steps=0)
    groups = asyncio.run(fakes.collect(policy, config=config, temperature=HEAT))
    for episode in fakes.all_episodes(groups):
        for turn in episode.turns:
            turn.policy_versions = [3]
    write_episodes(episodes_path(folder.path, 4), groups)
    return folder.path, policy, groups[0].episodes[0]


def asked(path, checkpoint: str) -> dict:
    wanted = {"source": "train", "step": 4, "line": 1, "checkpoint": checkpoint, "trust": False}
    return answer({"path": str(path), **wanted})


def test_the_checkpoint_that_wrote_an_episode_gives_its_logprobs(run):
    path, _, episode = run
    found = asked(path, "3")
    recorded = []
    for turn in episode.turns:
        recorded += [None] * len(turn.prompt_ids) + turn.logprobs
    assert found["scored"] == pytest.approx(recorded, abs=1e-4)
    assert (found["by"], found["start"], found["temperature"]) == ("step_000003", "untrained", HEAT)


def test_alternatives_and_kl_are_those_of_the_models(run):
    path, policy, episode = run
    found = asked(path, "3")
    untrained = fakes.tiny_policy()  # An adapter's model without it is the same.
    ids = [token for turn in episode.turns for token in turn.prompt_ids + turn.completion_ids]
    with torch.no_grad():
        ours, theirs = (
            torch.log_softmax(each.model_logits(torch.tensor([ids]))[0].float() / HEAT, dim=-1)
            for each in (policy, untrained)
        )
    kl = (ours.exp() * (ours - theirs)).sum(dim=-1).tolist()
    sampled = [place for place, value in enumerate(found["kl"]) if value is not None]
    assert len(sampled) == sum(len(turn.completion_ids) for turn in episode.turns)
    assert max(kl) > 0.01
    for place in sampled:
        assert found["kl"][place] == pytest.approx(kl[place - 1], abs=1e-4)
        best = ours[place - 1].topk(5)
        assert [token for token, _ in found["top"][place]] == best.indices.tolist()
        shares = [share for _, share in found["top"][place]]
        assert shares == pytest.approx(best.values.exp().tolist(), abs=1e-4)


def test_untrained_weights_have_not_moved_from_the_start(run):
    path, _, episode = run
    found = asked(path, "start")
    assert {value for value in found["kl"] if value is not None} == {0.0}
    assert found["scored"][len(episode.turns[0].prompt_ids)] != episode.turns[0].logprobs[0]


@pytest.fixture
def client(run):
    path, _, _ = run
    store = RunStore(path.parent.parent)
    app = server.build_app(store, scorer=TokenScorer(trust=False))
    with TestClient(app, base_url="http://127.0.0.1:8090", headers=OWN) as client:
        yield client


@pytest.mark.parametrize("run", [0], indirect=True)
def test_a_page_has_tokens_scored(client):
    tokens = client.get("/api/runs/fake/0001/tokens?step=4&line=1").json()
    assert tokens["weights"] == {"wrote": "3", "kept": ["3", "start"]}
    wanted = {"step": 4, "line": 1, "checkpoint": "3"}
    found = client.post("/api/runs/fake/0001/scores", json=wanted).json()
    for place, known in enumerate(tokens["logprob"]):
        assert found["scored"][place] == (
            known if known is None else pytest.approx(known, abs=1e-4)
        )
    texts = [text for top in found["top"] if top for text, _ in top]
    assert texts and all(isinstance(text, str) for text in texts)
    gone = client.post("/api/runs/fake/0001/scores", json={**wanted, "checkpoint": "2"})
    assert gone.status_code == 400
    assert "has no checkpoint '2'; there are: start, 3" in gone.json()["error"]


@pytest.mark.parametrize("run", [0], indirect=True)
@pytest.mark.parametrize(
    "changes",
    [{"checkpoint": "../x"}, {"checkpoint": 3}, {"line": "1"}, {"step": True}, {"source": 1}],
)
def test_requests_that_are_rejected(changes, client, monkeypatch):
    monkeypatch.setattr(scoring, "COMMAND", ("false",))
    wanted = {"step": 4, "line": 1, "checkpoint": "3"}
    found = client.post("/api/runs/fake/0001/scores", json={**wanted, **changes})
    assert (found.status_code, "expected" in found.json()["error"]) == (400, True)


def test_a_program_that_takes_too_long_is_ended_and_is_the_only_one(monkeypatch):
    monkeypatch.setattr(scoring, "COMMAND", (sys.executable, "-c", WAITS))

    async def ask_twice():
        scorer = TokenScorer(trust=False)
        first, second = asyncio.create_task(scorer.score({})), asyncio.create_task(scorer.score({}))
        with pytest.raises(ConfigError, match="is scoring another episode"):
            await second
        with pytest.raises(ConfigError, match="not scored within 600 s"):
            await first

    asyncio.run(ask_twice())


def test_the_end_of_the_viewer_ends_the_program(monkeypatch):
    monkeypatch.setattr(scoring, "COMMAND", (sys.executable, "-c", "import time; time.sleep(999)"))

    async def end_early():
        scorer = TokenScorer(trust=False)
        asked = asyncio.create_task(scorer.score({}))
        while scorer._process is None:
            await asyncio.sleep(0.01)
        await scorer.end()
        with pytest.raises(ConfigError, match="could not be scored"):
            await asked

    asyncio.run(end_early())


def test_the_program_ends_with_a_viewer_that_was_killed():
    """The kernel closes the other end of its stdin then."""
    code = (
        "import time; from openenv_pipe.extras.viewer import score_tokens as program\n"
        "program.answer = lambda wanted: time.sleep(999)\n"
        "program.main()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        process.communicate(b'{"limit_s": 600}\n')
    assert process.returncode == 1
