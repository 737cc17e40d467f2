"""Playing a checkpoint from the viewer: who replies, what the engine gets, how it ends."""

import asyncio
import json
import time
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import fakes
import pytest
from starlette.testclient import TestClient

from openenv_pipe.config.compose import compose
from openenv_pipe.engines import Completion, TokenRequest
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.extras.viewer import play_checkpoint
from openenv_pipe.extras.viewer.play_checkpoint import CheckpointPlay, SteeredEngine, for_play
from openenv_pipe.extras.viewer.web import server
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.types import Finish, Image

OWN = {"Origin": "http://127.0.0.1:8090", "Content-Type": "application/json"}
WISH = {"run": "fake/0001", "checkpoint": "start", "split": "eval", "index": 1}


class Recorder:
    """An engine that keeps its requests and always writes the same tokens."""

    capabilities = SimpleNamespace(takes="token_ids")
    max_episodes = 4

    def __init__(self) -> None:
        self.requests: list[TokenRequest] = []

    def begin_rollouts(self, num_episodes, limit):
        return 7

    async def generate(self, request):
        self.requests.append(request)
        return Completion(token_ids=[70], logprobs=[-1.0], finish=Finish.STOP, policy_versions=[3])


def test_the_engine_replies_where_the_person_does_not():
    replies = iter(["AB", None, "abc", None])

    async def choose():
        return next(replies)

    async def play():
        chat = SimpleNamespace(
            writer=SimpleNamespace(own_text=str.lower),
            reply_ids=lambda text: [ord(each) for each in text],
        )
        inner = Recorder()
        engine = SteeredEngine(inner, chat, choose)
        assert engine.begin_rollouts(1, 1) == 7
        ids, written = [], []
        for turn in range(4):
            ids.append(turn)
            request = TokenRequest(
                episode=7, turn=turn, max_tokens=2, temperature=1.0, seed=1, prompt_ids=[*ids]
            )
            written.append((await engine.generate(request)).token_ids)
            ids += written[-1]
        return inner.requests, written

    requests, written = asyncio.run(play())
    assert written == [[97, 98], [70], [97, 98], [70]]
    assert [each.prompt_ids for each in requests] == [
        [0, 97, 98, 1],
        [0, 97, 98, 1, 70, 2, 97, 98, 3],
    ]


def scripted(observations, draw, opening) -> str:
    """A scripted policy of the fake environment."""
    return f"seen {len(observations)}"


def test_a_run_of_a_program_is_not_played(runs_dir, seen):
    path = runs_dir / "fake" / "0001"
    config = RunFolder.open(path).config_to_run()
    agent = compose(["conf=echo", "agent=program", "agent.command=[echo]"]).config.agent
    config = config.model_copy(update={"agent": agent})
    RunFolder.create(config, overrides=[], command=[])
    with viewer(runs_dir) as client:
        client.post("/api/play/start", json={**WISH, "run": "fake/0002"})
        assert "are played by a program" in until(client, "ended")["note"]
    assert seen.opened == 0


@pytest.fixture
def seen(monkeypatch):
    """Fake parts of a run, in place of servers and a model; counts how often they were open."""
    seen = SimpleNamespace(opened=0, closed=0)
    policy = fakes.tiny_policy()

    @asynccontextmanager
    async def assembled(config, logs, verdicts, progress, *, checkpoint):
        seen.opened += 1
        engine, host = fakes.local_engine(policy), fakes.FakeHost()
        try:
            context = fakes.rollout_context(config, host, chat=policy.chat, engine=engine)
            yield SimpleNamespace(rollout=context)
        finally:
            seen.closed += 1

    monkeypatch.setattr(play_checkpoint, "_load_pipeline", lambda: assembled)
    return seen


@pytest.fixture
def runs_dir(tmp_path):
    """A folder of runs with one of the fake environment, which has a scripted policy."""
    baselines = {"counts": f"{__name__}:scripted"}
    changes = {"runs_dir": str(tmp_path), "name": "fake", "env.baselines": baselines}
    RunFolder.create(fakes.run_config(changes), overrides=[], command=[])
    return tmp_path


@contextmanager
def viewer(runs_dir, **options):
    """A client of a viewer that plays, and that ends with the block."""
    play = CheckpointPlay(runs_dir, trust=False, **options)
    app = server.build_app(RunStore(runs_dir), play=play)
    with TestClient(app, base_url="http://127.0.0.1:8090", headers=OWN) as client:
        yield client


def until(client, status: str) -> dict:
    """Wait until the session has a status, and return what a page shows."""
    for _ in range(3000):
        state = client.get("/api/play").json()
        if state["status"] == status:
            return state
        time.sleep(0.01)
    raise AssertionError(state)


def test_a_session_from_its_start_to_its_end(runs_dir, seen):
    with viewer(runs_dir) as client:
        assert client.get("/api/play").json() == {"status": None}
        assert client.post("/api/play/start", json=WISH).status_code == 200
        state = until(client, "choosing")
        assert state["model"] == "fake/0001 untrained"
        assert state["scripted"] == [{"counts": "seen 1"}]
        assert state["opening"] == [{"role": "user", "content": state["opening"][0]["content"]}]
        assert client.post("/api/play/reply", json={"text": "mine"}).status_code == 200
        state = until(client, "choosing")
        assert state["episode"]["turns"][0]["reply"] == "mine"
        client.post("/api/play/reply", json={"text": None})
        while (state := client.get("/api/play").json())["status"] != "over":
            if state["status"] == "choosing":
                client.post("/api/play/reply", json={})
        assert state["authors"][:2] == ["you", "the model"]
        assert len(state["authors"]) == len(state["scripted"]) == len(state["episode"]["turns"])
        # The engine's own count of versions is not the checkpoint's.
        assert all(turn["policy_versions"] == [] for turn in state["episode"]["turns"])
        assert state["episode"]["status"] == "done"
        assert state["episode"]["reward"] == pytest.approx(
            sum(turn["turn_reward"] for turn in state["episode"]["turns"])
        )
        again = client.post("/api/play/start", json={**WISH, "index": 2})
        assert again.status_code == 200
        state = until(client, "choosing")
        assert (state["index"], state["authors"], seen.opened) == (2, [], 1)
        client.post("/api/play/end", json={})
        assert (client.get("/api/play").json()["status"], seen.closed) == ("ended", 1)


def test_images_of_the_session_are_shown(runs_dir, seen, monkeypatch):
    image = Image("0" * 32, 3, 2, b"png")
    shown = StepResult({"text": "look", "screen": image}, 0.0, done=False)
    monkeypatch.setattr(fakes.FakeHost, "__init__", _host_that_shows(shown))
    with viewer(runs_dir) as client:
        client.post("/api/play/start", json=WISH)
        episode = until(client, "choosing")["episode"]
        (found,) = episode["first_images"]
        answer = client.get(f"/{found['address']}")
        assert (answer.content, answer.headers["Content-Type"]) == (b"png", "image/png")
        assert client.get(f"/{found['address']}x").status_code == 404


def _host_that_shows(result):
    made = fakes.FakeHost.__init__
    return lambda host: made(host, lambda *_: result)


def test_the_end_of_the_viewer_ends_the_session(runs_dir, seen):
    with viewer(runs_dir) as client:
        client.post("/api/play/start", json=WISH)
        until(client, "choosing")
        assert (seen.opened, seen.closed) == (1, 0)
    assert seen.closed == 1


def test_a_session_without_a_person_ends(runs_dir, seen):
    with viewer(runs_dir, idle_s=0.01) as client:
        client.post("/api/play/start", json=WISH)
        state = until(client, "ended")
    assert "nothing was chosen for" in state["note"]
    assert seen.closed == 1


def test_a_session_can_be_ended_while_it_starts(runs_dir, seen):
    with viewer(runs_dir) as client:
        client.post("/api/play/start", json=WISH)
        client.post("/api/play/end", json={})
        assert client.get("/api/play").json()["status"] == "ended"
        client.post("/api/play/start", json=WISH)
        until(client, "choosing")
    assert seen.opened == seen.closed


def test_one_session_at_a_time(runs_dir, seen):
    with viewer(runs_dir) as client:
        client.post("/api/play/start", json=WISH)
        until(client, "choosing")
        answer = client.post("/api/play/start", json=WISH)
        assert (answer.status_code, seen.opened) == (400, 1)
        assert "fake/0001 is still open; end it" in answer.json()["error"]


def test_an_untrusted_run_is_not_played(runs_dir, seen):
    path = runs_dir / "fake" / "0001" / "config.json"
    path.write_text(path.read_text().replace('"max_turns": 4', '"max_turns": 3'))
    with viewer(runs_dir) as client:
        client.post("/api/play/start", json=WISH)
        assert "--trust" in until(client, "ended")["note"]
    assert seen.opened == 0


def test_requests_that_are_rejected(runs_dir, seen):
    wrong = {"run": ["fake/0002", "../fake"], "checkpoint": ["../x", 3]}
    wrong |= {"split": ["test"], "index": [-1, True, "0"]}
    with viewer(runs_dir) as client:
        for changes in ({key: value} for key, values in wrong.items() for value in values):
            answer = client.post("/api/play/start", json={**WISH, **changes})
            assert answer.status_code == 400 and answer.json()["error"], changes
        for sent in (b"[]", b"{", b"[" * 9000, b'{"text": "%s"}' % (b"x" * 70_000)):
            assert client.post("/api/play/reply", content=sent).status_code == 400
        assert client.post("/api/play/reply", json={"text": "x"}).status_code == 400
    assert seen.opened == 0


def test_pages_of_other_sites_start_nothing(runs_dir, seen):
    with viewer(runs_dir) as client:
        for headers in (
            *({"Origin": f"http://{host}"} for host in ("evil.example", "127.0.0.1:8091")),
            *({"Origin": origin} for origin in ("null", "")),
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/x-www-form-urlencoded"},
            {"Host": "evil.example", "Origin": "http://evil.example"},
        ):
            answer = client.post("/api/play/start", content=json.dumps(WISH), headers=headers)
            assert answer.status_code == 403, headers
            assert client.get("/api/play").json() == {"status": None}


def test_a_token_is_needed_to_play(runs_dir):
    app = server.build_app(
        RunStore(runs_dir), token="right", play=CheckpointPlay(runs_dir, trust=False)
    )
    client = TestClient(app, base_url="http://127.0.0.1:8090", headers=OWN)
    assert client.post("/api/play/start", json=WISH).status_code == 401


def test_a_session_needs_one_server_and_asks_no_judge():
    judged = compose(["conf=coding_judge"]).config
    config = for_play(judged)
    assert (config.host.num_servers, config.host.sessions_per_server) == (1, 1)
    assert config.judge.type == "none"
