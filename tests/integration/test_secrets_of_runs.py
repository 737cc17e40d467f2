"""No secret is in any file or output of a run, whatever servers and endpoints repeat."""

import gzip
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.commands import REPOSITORY, SMALL, run

SECRET = "sk-l1teral/0123+456789"
FROM_ENVIRONMENT = "tok-9876543210-abc"
# An Echo that tells all it was told, in its log, its observations and the errors of its steps.
SERVER = """
import os, sys, uvicorn
sys.path.insert(0, {envs!r})
from echo.server import app, echo_environment
token = os.environ["SERVER_TOKEN"]
print("starting with", token, "and", repr(token), flush=True)
class Telling(echo_environment.EchoEnvironment):
    def reset(self, *arguments, **keywords):
        observation = super().reset(*arguments, **keywords)
        observation.metadata["token"] = f"it is {{token}}\\x1b[2J"
        return observation
    def step(self, *arguments, **keywords):
        print(token, file=sys.stderr, flush=True)
        observation = super().step(*arguments, **keywords)
        observation.metadata["token"] = token
        if os.environ.get("RAISES"):
            raise ValueError("<b>no</b>\\n# heading\\x1b[2J " + token + "x" * 9000)
        return observation
from openenv.core.env_server.http_server import create_app
application = create_app(
    Telling, app.EchoAction, app.EchoObservation, env_name="echo", max_concurrent_envs=64
)
uvicorn.run(application, host="127.0.0.1", port=int(sys.argv[1]))
"""


class Repeating(BaseHTTPRequestHandler):
    """Is healthy, and answers everything else with 401 and what it was sent."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer(200 if self.path == "/health" else 401)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(401)

    def _answer(self, status):
        sent = dict(self.headers)
        content = json.dumps({"error": f"\x1b[2Jincorrect: {sent}"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        """Log nothing."""


@pytest.fixture
def endpoint():
    with ThreadingHTTPServer(("127.0.0.1", 0), Repeating) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


def written(folder):
    """Return everything in the files below a folder, by name."""
    return {
        path.relative_to(folder).as_posix(): (
            gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        ).decode(errors="replace")
        for path in folder.rglob("*")
        if path.is_file()
    }


def assert_nothing_leaks(folder, *outputs):
    for name, text in [*written(folder).items(), *enumerate(outputs)]:
        for secret in (SECRET, FROM_ENVIRONMENT):
            assert secret not in text, name
            assert secret.replace("/", "%2F") not in text, name
        binary = (".png", ".safetensors", ".sqlite")
        if not str(name).endswith(binary) and "/logs/" not in str(name):
            assert "\x1b" not in text, name


@pytest.mark.parametrize("key", [SECRET, "${oc.env:MY_TOKEN}"])
def test_an_endpoint_that_repeats_the_key_in_its_rejection(tmp_path, endpoint, monkeypatch, key):
    monkeypatch.setenv("MY_TOKEN", FROM_ENVIRONMENT)
    engine = ("engine=openai", "engine.model=m", f"engine.base_url={endpoint}/v1")
    arguments = ("conf=echo", *engine, f"engine.api_key={key}", "eval.num_tasks=2", *SMALL)
    code, out, err = run(tmp_path, "eval", *arguments)
    assert (code, out) == (2, "")
    assert 'answered 401: \'{"error": "\\\\u001b[2Jincorrect: ' in err and "<hidden: " in err
    record = json.loads((tmp_path / "runs/echo/0001/run.json").read_text())
    assert "<hidden: " in record["cause"] and record["status"] == "failed"
    assert_nothing_leaks(tmp_path, out, err)


def test_an_environment_server_that_repeats_the_headers(tmp_path, endpoint, monkeypatch):
    """It rejects the WebSocket, so the training has no episode."""
    monkeypatch.setenv("MY_TOKEN", FROM_ENVIRONMENT)
    headers = (
        f"host.headers={{Authorization: 'Bearer ${{oc.env:MY_TOKEN}}', X-Api-Key: '{SECRET}'}}"
    )
    host = ("host=attach", f"host.urls=[{endpoint}]", headers)
    code, out, err = run(tmp_path, "train", "conf=smoke", *host, *SMALL)
    assert code == 1, err
    assert_nothing_leaks(tmp_path, out, err)


def server(tmp_path):
    path = tmp_path / "server.py"
    path.write_text(SERVER.format(envs=str(REPOSITORY / "envs")))
    return f"env.command=[{sys.executable},{path},'{{port}}']"


def test_a_training_with_a_server_that_tells_its_secret(tmp_path):
    """In its log, its observations, and so in episodes and reports."""
    overrides = ["conf=echo", server(tmp_path), f"env.variables.SERVER_TOKEN='{SECRET}'"]
    small = ("trainer.steps=1", "trainer.warm_start.steps=0", "eval.num_tasks=2", *SMALL)
    code, out, err = run(tmp_path, "train", *overrides, *small)
    assert code == 0, err
    assert_nothing_leaks(tmp_path / "runs", out, err)
    files = written(tmp_path / "runs" / "echo" / "0001")
    for name in ("logs/attempt_1/env-0.log", "episodes/step_000001.jsonl.gz", "config.json"):
        assert "<hidden: SERVER_TOKEN>" in files[name], name


def test_what_a_step_raises_is_shown_cut_and_cleaned_everywhere(tmp_path):
    """All episodes fail with an error of 9,000 characters that would act on a page."""
    overrides = ["conf=echo", server(tmp_path), f"env.variables.SERVER_TOKEN='{SECRET}'"]
    raising = ("env.variables.RAISES=1", "eval.num_tasks=2", "eval.baselines=false")
    small = ("trainer.steps=1", "trainer.warm_start.steps=0", *SMALL)
    code, out, err = run(tmp_path, "train", *overrides, *raising, *small)
    assert code == 1
    shown = run(tmp_path, "runs")[1] + run(tmp_path, "compare", "runs/echo/0001")[1]
    assert_nothing_leaks(tmp_path / "runs", out, err, shown)
    folder = tmp_path / "runs" / "echo" / "0001"
    cause = json.loads((folder / "run.json").read_text())["cause"]
    report = (folder / "report.md").read_text()
    # Markdown renders neither headings nor HTML inside of a code block.
    outside = re.sub(r"(?ms)^(`{3,})text$.*?^\1$", "", report)
    assert "heading" in report and "heading" not in outside and "<b>" not in outside
    for text in (cause, err):
        assert len(text) < 6000 and "more characters; whole text in " in text
    whole = (folder / "logs/latest/error.txt").read_text()
    assert "x" * 1500 in whole and SECRET not in whole
