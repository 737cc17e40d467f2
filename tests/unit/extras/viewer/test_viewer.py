"""The viewer's server: what its addresses answer, and whom it rejects. No browser is needed."""

import asyncio
import json
import os
import re
import shutil
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import run_samples
from starlette.testclient import TestClient

from openenv_pipe.cli.main import main
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.extras.viewer import view as viewing
from openenv_pipe.extras.viewer.play_checkpoint import CheckpointPlay
from openenv_pipe.extras.viewer.view import find_target
from openenv_pipe.extras.viewer.web import server
from openenv_pipe.extras.viewer.web.answers import as_json
from openenv_pipe.extras.viewer.web.run_page import panels_of
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.runs.evals import DURING

pytestmark = pytest.mark.slow

STATIC = server.STATIC


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run of three steps with evaluations."""
    folder = run_samples.create(tmp_path_factory.mktemp("runs"))
    run_samples.train(folder, num_steps=3)
    run_samples.evaluate(folder, "start", 0.2)
    run_samples.evaluate(folder, f"{DURING}000001", 0.3, step=1)
    run_samples.evaluate(folder, "trained", 0.6, step=3)
    (folder.logs / "env-0.log").write_text("first\nready <b>\x1b[31m\n")
    folder.finish("finished")
    return folder


@pytest.fixture(scope="module")
def client(folder):
    return open_client(folder.path.parents[1])


def open_client(runs_dir: Path, **options) -> TestClient:
    return TestClient(
        server.build_app(RunStore(runs_dir), **options), base_url="http://127.0.0.1:8090"
    )


def test_the_table_of_runs(client):
    (run,) = client.get("/api/runs").json()["runs"]
    assert (run["key"], run["status"], run["env"]) == ("smoke/0001", "finished", "wordle")
    assert (run["stage"], run["step"]) == ("grpo", 3)
    assert run["success_start"]["mean"] == pytest.approx(0.2)
    assert run["success_trained"]["mean"] == pytest.approx(0.6)
    assert run["left_s"] is None, "nothing is left of a finished run"


def test_the_table_of_runs_has_no_result_of_a_run_that_was_extended_since(tmp_path):
    folder = run_samples.create(tmp_path)
    run_samples.train(folder, num_steps=3)
    run_samples.evaluate(folder, "trained", 0.6, step=2)
    (run,) = open_client(tmp_path).get("/api/runs").json()["runs"]
    assert run["success_trained"] is None


def test_a_folder_that_cannot_be_read_has_a_row(tmp_path):
    (tmp_path / "a" / "0001").mkdir(parents=True)
    (tmp_path / "a" / "0001" / "run.json").write_text("{}")
    (run,) = open_client(tmp_path).get("/api/runs").json()["runs"]
    assert run["status"] == "unreadable"
    assert "run.json is damaged" in run["problem"]


def test_a_pipe_in_the_place_of_the_metrics_does_not_block(tmp_path):
    folder = run_samples.create(tmp_path)
    os.mkfifo(folder.metrics_path)
    assert open_client(tmp_path).get("/api/runs/smoke/0001/curves").json()["steps"] == []


def test_a_running_run_says_what_is_left(tmp_path):
    folder = run_samples.create(tmp_path)
    run_samples.train(folder, num_steps=2)
    (run,) = open_client(tmp_path).get("/api/runs").json()["runs"]
    assert run["status"] == "running"
    assert run["left_s"] == pytest.approx(2.0 * (run["num_steps"] - 2))


def test_a_run_that_stopped_can_be_continued(tmp_path, client):
    def said(served):
        return served.get("/api/runs/smoke/0001/progress").json()["resume"]

    assert said(client) is None, "it has finished"
    folder = run_samples.create(tmp_path)
    stopped = TestClient(server.build_app(RunStore(tmp_path)), base_url="http://127.0.0.1")
    assert said(stopped) is None, "it is running"
    folder.finish("interrupted")
    assert said(stopped) == f"openenv-pipe train --resume {folder.path}"
    record = json.loads((folder.path / "run.json").read_text())
    (folder.path / "run.json").write_text(json.dumps(record | {"purpose": "evaluation"}))
    assert said(stopped) is None, "it has evaluations only"


def test_a_running_run_says_how_much_memory_it_has(tmp_path, client):
    folder = run_samples.create(tmp_path)
    run_samples.train(folder, num_steps=2)
    with folder.metrics_path.open("a") as file:
        file.write('{"step": 3, "stage": "grpo", "time/memory_gib": 1.5}\n')
        file.write('{"step": 4, "stage": "grpo", "reward/mean": 1.0}\n')  # not measured again
    own = open_client(tmp_path)
    run, progress = (own.get(f"/api/runs/smoke/0001{part}").json() for part in ("", "/progress"))
    assert run["memory_gib"] == progress["memory_gib"] == 1.5
    assert progress.keys() < run.keys()
    curves = own.get("/api/runs/smoke/0001/curves").json()
    assert "Memory" in [panel["title"] for panel in curves["panels"]]
    assert client.get("/api/runs/smoke/0001").json()["memory_gib"] is None


def test_curves_are_grouped_and_explained(client):
    curves = client.get("/api/runs/smoke/0001/curves").json()
    assert curves["steps"] == [1, 2, 3]
    assert len(curves["values"]["reward/mean"]) == 3
    panels = {panel["title"]: panel["names"] for panel in curves["panels"]}
    assert panels["Mismatch of logprobs"] == ["mismatch/mean", "mismatch/max"]
    assert "entropy of the next token" in curves["explanations"]["loss/entropy"]["meaning"]
    assert "explores" in curves["explanations"]["loss/entropy"]["hint"]
    assert [each["step"] for each in curves["evaluations"]] == [0, 1, 3]


def test_a_curve_has_no_evaluations_of_something_else(tmp_path):
    folder = run_samples.create(tmp_path)
    run_samples.train(folder)
    run_samples.evaluate(folder, "start", 0.2, step=0)
    run_samples.evaluate(folder, "start.echo", 0.3, step=0)
    for name, change in (
        ("step_000001", {}),
        ("step_000002", {"opponent": "perfect"}),
        ("step_000003", {"measured_with": {"env.success_reward": "0.5, not 1.0"}}),
    ):
        run_samples.evaluate(folder, name, 0.5, step=int(name[-1]))
        path = folder.path / f"eval/{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    curves = open_client(tmp_path).get("/api/runs/smoke/0001/curves").json()
    assert [each["label"] for each in curves["evaluations"]] == ["start", "step_000001"]


def test_only_new_steps_are_sent(tmp_path):
    folder, client = run_samples.create(tmp_path), open_client(tmp_path)
    run_samples.train(folder, num_steps=2)
    address = "/api/runs/smoke/0001/curves"
    first = client.get(address).json()
    run_samples.train(folder, num_steps=1)
    more = client.get(address, params={"epoch": first["epoch"], "after": 2}).json()
    assert (more["start"], more["steps"]) == (2, [1])
    content = folder.metrics_path.read_bytes()
    folder.metrics_path.rename(tmp_path / "old")
    folder.metrics_path.write_bytes(content[: content.index(b"\n") + 1] + b'{"step": 2, "st')
    after = client.get(address, params={"epoch": first["epoch"], "after": 3}).json()
    assert (after["start"], after["steps"]) == (0, [1]), "a resume has replaced the file"


def test_one_run(client):
    run = client.get("/api/runs/smoke/0001").json()
    assert run["config"]["trainer"]["steps"] == run["num_steps"]
    assert run["evaluations"] == ["start", "trained"]
    assert run["logs"] == ["attempt_1/env-0.log"]
    log = client.get("/api/runs/smoke/0001/log", params={"name": "attempt_1/env-0.log"}).json()
    assert log["text"] == "first\nready <b>\\u001b[31m\n"


@pytest.mark.parametrize(
    "name", ["attempt_1/../../run.json", "attempt_1/secret", "/etc/passwd", "", "attempt_1/pipe"]
)
def test_logs_are_only_files_of_the_run(client, folder, tmp_path, name):
    (folder.logs / "secret").unlink(missing_ok=True)
    (folder.logs / "secret").symlink_to("/etc/passwd")
    if not (folder.logs / "pipe").exists():
        os.mkfifo(folder.logs / "pipe")
    answer = client.get("/api/runs/smoke/0001/log", params={"name": name})
    assert answer.status_code == 404
    assert "root:" not in answer.text


@pytest.mark.parametrize(
    "key", ["smoke/0002", "smoke/%2e%2e", "%2e/%2e", "%2e%2e/%2e%2e", "a/%00", "a%2fb/c"]
)
def test_only_runs_of_the_folder_are_shown(client, key):
    assert client.get(f"/api/runs/{key}").status_code == 404


def test_every_answer_forbids_what_comes_from_elsewhere(client):
    for path in ("/", "/static/app.js", "/api/runs", "/api/runs/x/y", "/nothing"):
        headers = client.get(path).headers
        assert headers["Content-Security-Policy"].startswith("default-src 'self';"), path
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::2]:80"])
def test_names_of_others_are_rejected(client, host):
    answer = client.get("/api/runs", headers={"Host": host})
    assert answer.status_code == 403
    assert "smoke" not in answer.text


@pytest.mark.parametrize("host", ["localhost:1", "LOCALHOST", "127.0.0.1:8090", "[::1]:8090"])
def test_names_of_this_machine_are_accepted(client, host):
    assert client.get("/api/runs", headers={"Host": host}).status_code == 200


def test_nothing_can_be_sent(client):
    own = {"Origin": "http://127.0.0.1:8090", "Content-Type": "application/json"}
    assert client.post("/api/runs", headers=own).status_code == 405
    assert client.post("/api/runs").status_code == 403


@pytest.fixture
def guarded(folder):
    """A client without a cookie of a viewer that plays and needs a token."""
    runs_dir = folder.path.parents[1]
    return open_client(runs_dir, token="right", play=CheckpointPlay(runs_dir, trust=False))


def test_every_route_needs_the_token(guarded):
    own = {"Origin": "http://127.0.0.1:8090", "Content-Type": "application/json"}
    paths = [re.sub(r"\{\w+\}", "x", each.path) for each in guarded.app.routes]
    assert {"/", "/static", "/api/runs/x/x/events", "/api/play/start"} < set(paths)
    for path in [*paths, "/static/app.js", "/nothing", "/api/runs/smoke/0001"]:
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"):
            for url in (path, f"{path}?token=wrong", f"{path}?token=", f"{path}?token=%ff"):
                for cookie in ("", "openenv_pipe_view_8090=wrong", "openenv_pipe_view_80=right"):
                    headers = {**own, "Cookie": cookie}
                    answer = guarded.request(method, url, headers=headers)
                    assert answer.status_code == 401, (method, url, cookie)
                    assert "smoke" not in answer.text


def test_no_websocket_is_accepted(guarded):
    sent = []

    async def send(message):
        sent.append(message["type"])

    scope = {"type": "websocket", "path": "/api/runs", "headers": [], "query_string": b""}
    asyncio.run(guarded.app(scope, None, send))
    assert sent == ["websocket.close"]


def test_the_link_moves_the_token_into_a_cookie(guarded):
    answer = guarded.get("/?token=right", follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["Location"] == "./", "without the token, and behind any proxy's prefix"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Cache-Control"] == "no-store"
    cookie = answer.headers["Set-Cookie"].lower()
    assert cookie == "openenv_pipe_view_8090=right; httponly; samesite=strict"
    assert guarded.get("/").status_code == 200
    assert guarded.get("/api/runs").json()["runs"]


def test_only_the_first_page_takes_a_token_from_its_address(guarded):
    for path in ("/api/runs", "/static/app.js", "/api/runs/smoke/0001/events"):
        assert guarded.get(path, params={"token": "right"}).status_code == 401, path
    wrong_origin = {"Origin": "http://evil.example", "Content-Type": "application/json"}
    assert guarded.post("/?token=right", headers=wrong_origin).status_code == 403


def test_two_viewers_of_one_host_keep_their_tokens(folder):
    """Browsers send the cookies of all ports of a host to each of them."""
    runs_dir = folder.path.parents[1]
    cookies = []
    for port in (8090, 9999):
        server = open_client(runs_dir, token=f"token of {port}")
        headers = {"Host": f"127.0.0.1:{port}"}
        answer = server.get(f"/?token=token of {port}", headers=headers, follow_redirects=False)
        cookies.append(answer.headers["Set-Cookie"].partition(";")[0])
    cookies.insert(0, 'of_another_program={"a": [1]}')
    for port in (8090, 9999):
        server = open_client(runs_dir, token=f"token of {port}")
        headers = {"Host": f"127.0.0.1:{port}", "Cookie": "; ".join(cookies)}
        assert server.get("/api/runs", headers=headers).status_code == 200


def test_the_token_does_not_replace_the_check_of_names(folder, guarded):
    headers = {"Host": "evil.example:8090", "Cookie": "openenv_pipe_view_8090=right"}
    for path in ("/api/runs", "/?token=right"):
        assert guarded.get(path, headers=headers).status_code == 403, path
    public = open_client(folder.path.parents[1], token="right", is_local=False)
    assert public.get("/api/runs", headers=headers).status_code == 200


def test_a_page_without_the_token_says_what_to_do(guarded):
    answer = guarded.get("/")
    assert answer.status_code == 401
    assert answer.headers["Content-Type"].startswith("text/html")
    assert "Open the link that <code>openenv-pipe view</code> printed" in answer.text
    error = guarded.get("/api/runs").json()["error"]
    assert "Open the link that `openenv-pipe view` printed" in error


@pytest.fixture
def served(folder, monkeypatch, capsys):
    """Run `view` with some options; return its exit code, what it prints, and the applications."""
    apps = []
    monkeypatch.setattr(
        viewing, "serve", lambda app, listener: (apps.append(app), listener.close())
    )

    def run(*options: str):
        with pytest.raises(SystemExit) as ended:
            main(["view", str(folder.path), *options])
        return ended.value.code, capsys.readouterr().err, apps

    return run


def test_every_viewer_has_a_random_token_in_its_link(served):
    tokens = []
    for _ in range(2):
        code, said, apps = served()
        link = urlsplit(said.strip())
        assert (code, link.fragment) == (0, "/run/smoke/0001")
        (token,) = parse_qs(link.query)["token"]
        client = TestClient(apps[-1], base_url=f"http://{link.netloc}")
        assert client.get("/api/runs").status_code == 401
        assert client.get(f"/?{link.query}").status_code == 200
        assert client.get("/api/runs").status_code == 200
        tokens.append(token)
    assert tokens[0] != tokens[1]
    assert min(map(len, tokens)) >= 32


def test_no_token_says_what_it_means(served):
    code, said, apps = served("--no-token")
    note, link = said.splitlines()
    assert (code, "token=" in link) == (0, False)
    assert "every user and every program of this machine can read these runs, and play" in note
    client = TestClient(apps[-1], base_url=f"http://{urlsplit(link).netloc}")
    assert client.get("/api/runs").status_code == 200
    assert client.get("/api/runs", headers={"Host": "evil.example"}).status_code == 403


def test_no_token_is_rejected_where_other_machines_reach_the_viewer(served):
    code, said, apps = served("--no-token", "--host", "0.0.0.0")
    assert (code, apps) == (2, [])
    assert "--no-token with --host 0.0.0.0" in said


def test_the_pages_load_nothing_from_elsewhere_and_never_parse_data_as_html():
    own = [path for path in STATIC.iterdir() if path.suffix in (".html", ".js", ".css")]
    assert len(own) > 5
    for path in own:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")  # a name, never loaded
        if path.name.startswith("uPlot."):
            continue
        assert "http://" not in text and "https://" not in text, path.name
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, (path.name, word)
    assert (STATIC / "uPlot.LICENSE").read_text().startswith("The MIT License")


def test_json_is_ascii_and_has_no_invisible_characters():
    text = as_json({"a\u202e": ["\ud800\x1b[31m", float("nan"), 1.5, {"b": (None, True)}]})
    assert text.isascii()
    assert json.loads(text) == {"a\\u202e": ["\\ud800\\u001b[31m", None, 1.5, {"b": [None, True]}]}


def test_targets(folder, monkeypatch):
    runs_dir = folder.path.parents[1]
    monkeypatch.chdir(runs_dir.parent)
    assert find_target(str(runs_dir), None) == (runs_dir, "", "")
    assert find_target(str(folder.path), None) == (runs_dir, "#/run/smoke/0001", "")
    link = str(runs_dir / "smoke" / "latest")
    assert find_target(link, None) == (runs_dir, "#/run/smoke/0001", "")
    sweep = runs_dir / "sweeps" / "2026"
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text("{}")
    assert find_target(str(sweep), None) == (runs_dir, "#/sweep/2026", "")
    shutil.rmtree(runs_dir / "sweeps")
    with pytest.raises(RunFolderError, match="no folder"):
        find_target("nothing", None)


def test_a_port_that_is_taken():
    with server.open_socket("127.0.0.1", 0, is_fixed=True) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another --port"):
            server.open_socket("127.0.0.1", port, is_fixed=True)
        with server.open_socket("127.0.0.1", port, is_fixed=False) as other:
            assert other.getsockname()[1] > port


def test_the_command_names_a_folder_that_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["view"])
    assert ended.value.code == RunFolderError.exit_code
    assert "there is no folder 'runs'" in capsys.readouterr().err


def test_environments_and_players_are_curves_of_common_plots():
    environments = ["environment/echo/reward/mean", "environment/wordle/reward/mean"]
    names = ["reward/mean", *environments, "player/x/reward", "environment/echo/env/a"]
    found = {panel["title"]: panel["names"] for panel in panels_of(names)}
    assert found == {
        "Reward": ["reward/mean"],
        "Reward by environment": environments,
        "Reward by player": ["player/x/reward"],
        "environment/echo/env": ["environment/echo/env/a"],
    }
