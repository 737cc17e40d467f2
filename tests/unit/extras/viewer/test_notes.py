"""Notes on episodes and names of views: where they are written, by whom, and what is rejected."""

import json
import shutil

import pytest
import run_samples
from starlette.testclient import TestClient

from openenv_pipe.extras.viewer.web import server
from openenv_pipe.extras.viewer.web.notes import FILE
from openenv_pipe.extras.viewer.web.run_store import RunStore

ORIGIN = {"Origin": "http://127.0.0.1:8090", "Content-Type": "application/json"}
OWN = ORIGIN | {"Cookie": "openenv_pipe_view_8090=right"}
NOTES = "/api/runs/smoke/0001/notes"
NOTE = {"episode": "train 1 2", "text": "repeats \u201ccrane\u201d\nat once"}


@pytest.fixture
def runs_dir(tmp_path):
    folder = run_samples.create(tmp_path / "runs")
    run_samples.train(folder)
    return tmp_path / "runs"


def viewer(runs_dir, *, headers=OWN, **options) -> TestClient:
    app = server.build_app(RunStore(runs_dir), **{"token": "right", **options})
    return TestClient(app, base_url="http://127.0.0.1:8090", headers=headers)


def files_in(folder) -> dict:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_notes_are_beside_the_run_folder_which_stays_as_it_is(runs_dir):
    before = files_in(runs_dir / "smoke")
    client = viewer(runs_dir)
    assert client.post(NOTES, json=NOTE).status_code == 200
    assert client.post("/api/views", json={"name": "bad", "address": "#/runs?q=x"}).is_success
    assert files_in(runs_dir / "smoke") == before
    again = viewer(runs_dir)
    assert again.get(NOTES).json() == {"notes": {"train 1 2": NOTE["text"]}, "can_write": True}
    assert again.get("/api/views").json()["views"] == {"bad": "#/runs?q=x"}
    again.post(NOTES, json={**NOTE, "text": " "})
    again.post("/api/views", json={"name": "bad", "address": ""})
    assert again.get(NOTES).json()["notes"] == again.get("/api/views").json()["views"] == {}


@pytest.mark.parametrize("options", [{"token": None}, {"is_local": False}])
def test_only_a_viewer_that_nobody_else_reaches_writes(options, runs_dir):
    assert viewer(runs_dir).post(NOTES, json=NOTE).is_success
    client = viewer(runs_dir, **options)
    before = (runs_dir / FILE).read_bytes()
    for path, sent in ((NOTES, NOTE), ("/api/views", {"name": "a", "address": "#/runs"})):
        answer = client.post(path, json=sent)
        assert (answer.status_code, "writes no notes" in answer.json()["error"]) == (400, True)
    assert client.get(NOTES).json() == {"notes": {"train 1 2": NOTE["text"]}, "can_write": False}
    assert (runs_dir / FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("headers", "status"),
    [(ORIGIN, 401), (OWN | {"Origin": "http://evil.example"}, 403), ({"Cookie": "a=b"}, 403)],
)
def test_others_write_nothing(headers, status, runs_dir):
    client = viewer(runs_dir, headers=headers)
    assert client.post(NOTES, content=json.dumps(NOTE)).status_code == status
    assert not (runs_dir / FILE).exists()


def test_a_later_run_of_the_same_number_has_no_notes_of_the_one_before(runs_dir):
    client = viewer(runs_dir)
    client.post(NOTES, json=NOTE)
    shutil.rmtree(runs_dir / "smoke")
    run_samples.create(runs_dir)
    assert client.get(NOTES).json()["notes"] == {}


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        (NOTES, {**NOTE, "episode": "train 1"}),
        (NOTES, {**NOTE, "episode": 3}),
        (NOTES, {**NOTE, "text": "x" * 10_001}),
        (NOTES, {**NOTE, "text": None}),
        ("/api/runs/smoke/0002/notes", NOTE),
        ("/api/views", {"name": " ", "address": "#/runs"}),
        ("/api/views", {"name": "x" * 81, "address": "#/runs"}),
        ("/api/views", {"name": "a", "address": "javascript:alert(1)"}),
        ("/api/views", {"name": "a", "address": "https://evil.example/#/runs"}),
    ],
)
def test_what_is_no_note_and_no_view_is_rejected(path, sent, runs_dir):
    answer = viewer(runs_dir).post(path, json=sent)
    assert answer.status_code == 400 and answer.json()["error"]
    assert not (runs_dir / FILE).exists()


def test_a_file_of_somebody_else_opens_no_other_address(runs_dir):
    views = {"good": "#/runs", "bad": "javascript:alert(1)", "worse": 3}
    (runs_dir / FILE).write_text(json.dumps({"views": views, "runs": {"smoke/0001": 3}}))
    client = viewer(runs_dir)
    assert client.get("/api/views").json()["views"] == {"good": "#/runs"}
    assert client.get(NOTES).json()["notes"] == {}
    (runs_dir / FILE).write_text("[")
    assert client.get(NOTES).status_code == 404
    assert client.post(NOTES, json=NOTE).status_code == 400
    assert (runs_dir / FILE).read_text() == "[", "what cannot be read is not replaced"
