"""A hosted model plays: in evaluations, on the tasks of a trained one, and as a teacher."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from openenv_pipe.runs.episodes import episodes_path, read_episodes
from tests.commands import run


class Letters(BaseHTTPRequestHandler):
    """An endpoint whose model answers with the letter that the last message asks for."""

    protocol_version = "HTTP/1.1"
    num_asked = 0

    def do_POST(self) -> None:
        Letters.num_asked += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        letter = re.findall(r"\b[a-z]\b", body["messages"][-1]["content"])[-1]
        choice = {"message": {"content": letter}, "finish_reason": "stop"}
        content = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Letters) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join(10)


PROGRAM = """
import json, os, urllib.request

def post(url, body):
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), key)
    return json.load(urllib.request.urlopen(request))

messages = json.load(open(os.environ["OPENENV_TASK_FILE"]))["messages"]
while True:
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages})
    reply = answer["choices"][0]["message"]
    result = post(os.environ["OPENENV_URL"] + "/step", {"action": {"message": reply["content"]}})
    if result["done"]:
        break
    messages += [reply, {"role": "user", "content": result["observation"]["letter"]}]
"""


def test_a_program_plays_with_a_hosted_model(tmp_path, endpoint):
    (tmp_path / "agent.py").write_text(PROGRAM)
    engine = ("engine=openai", "engine.model=hosted", "engine.api_key=null")
    where = (f"engine.base_url={endpoint}", "engine.cache_dir=null")
    agent = ("agent=program", "agent.command=['{python}','-S','agent.py']")
    code, _, err = run(tmp_path, "eval", "conf=echo", "eval.num_tasks=2", *engine, *where, *agent)
    assert code == 0, err
    report = json.loads((tmp_path / "runs/echo/0001/eval/openai.json").read_text())
    assert (report["model"], report["success"]["mean"]) == ("hosted", 1.0)


def test_a_hosted_model_is_evaluated_and_a_second_time_costs_nothing(
    tmp_path, endpoint, monkeypatch
):
    monkeypatch.setenv("HOSTED_API_KEY", "sk-0123456789")
    engine = ("engine=openai", "engine.model=hosted", "engine.api_key=${oc.env:HOSTED_API_KEY}")
    where = (f"engine.base_url={endpoint}", f"engine.cache_dir={tmp_path / 'cache'}")
    num_asked = []
    for number in ("0001", "0002"):
        code, out, err = run(tmp_path, "eval", "conf=echo", "eval.num_tasks=8", *engine, *where)
        assert code == 0, err
        assert "hosted" in out
        report = json.loads((tmp_path / "runs/echo" / number / "eval/openai.json").read_text())
        assert (report["model"], report["success"]["mean"]) == ("hosted", 1.0)
        num_asked.append(Letters.num_asked)
    assert num_asked[0] == num_asked[1] > 8
    written = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert "sk-0123456789" not in "".join(written)


def test_a_hosted_model_plays_what_the_warm_start_imitates(tmp_path, endpoint, monkeypatch):
    monkeypatch.setenv("HOSTED_API_KEY", "sk-0123456789")
    source, key = "trainer.warm_start.source", "engine.api_key=${oc.env:HOSTED_API_KEY}"
    teacher = (
        *("trainer/warm_start/source=teacher", f"{source}.engine.model=hosted"),
        *(f"{source}.engine.base_url={endpoint}", f"{source}.{key}"),
        *(f"{source}.num_tasks=3", f"{source}.samples_per_task=2"),
        f"{source}.engine.cache_dir={tmp_path / 'cache'}",
    )
    steps = ("trainer.steps=0", "trainer.warm_start.steps=2", "eval.num_tasks=2")
    code, _, err = run(tmp_path, "train", "conf=echo", "eval.baselines=false", *steps, *teacher)
    assert code == 0, err
    assert "imitating 3 of 6 episodes" in err
    folder = tmp_path / "runs/echo/0001"
    for group in read_episodes(episodes_path(folder, 0)):
        (episode,) = group.episodes
        assert episode.success and len(episode.turns) == 4
        assert all(turn.completion_ids and turn.reply.islower() for turn in episode.turns)
    assert {path.stem for path in folder.glob("eval/*.json")} == {"start", "warm_start"}
    written = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert "sk-0123456789" not in "".join(written)
