"""Images of observations in the viewer, from the run's own folder only, and in recordings."""

import io

import PIL.Image
import pytest
import run_samples
from starlette.testclient import TestClient

from openenv_pipe.environments.images import with_references
from openenv_pipe.extras.reproduce.recording import record
from openenv_pipe.extras.viewer.web import server
from openenv_pipe.extras.viewer.web.bundle import write_bundle
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.runs.episodes import episodes_path, read_episodes, write_episodes

ROWS = [[[250, column, row] for column in range(40)] for row in range(32)]


@pytest.fixture
async def folder(tmp_path):
    """A run of one step, whose episodes have seen an image."""
    folder = run_samples.create(tmp_path / "runs")
    groups = run_samples.groups(num_groups=1, size=2)
    for each in groups[0].episodes:
        each.first_observation = await with_references({"screen": ROWS, "score": 1})
    write_episodes(episodes_path(folder.path, 1), groups)
    return folder


@pytest.fixture
def client(folder):
    app = server.build_app(RunStore(folder.path.parents[1]))
    return TestClient(app, base_url="http://127.0.0.1")


def test_a_image_is_shown_beside_its_observation(client):
    episode = client.get("/api/runs/smoke/0001/episode", params={"step": 1, "line": 1}).json()
    (image,) = episode["first_images"]
    assert image["size"] == "[image: 40 x 32 pixels]"
    assert episode["first_observation"] == {"screen": image["size"], "score": "1"}
    assert [step["images"] for turn in episode["turns"] for step in turn["steps"]] == [
        [] for turn in episode["turns"] for _ in turn["steps"]
    ]
    answer = client.get(f"/{image['address']}")
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-content-type-options"] == "nosniff"
    with PIL.Image.open(io.BytesIO(answer.content)) as file:
        assert file.size == (40, 32)


@pytest.mark.parametrize("name", ["../run.json", "run.json", "", "0" * 32 + ".png", "/etc/passwd"])
def test_nothing_else_than_images_of_the_run_is_served(client, folder, name):
    answer = client.get("/api/runs/smoke/0001/image", params={"name": name})
    assert answer.status_code == 404 and "error" in answer.json()


def test_links_out_of_the_run_are_not_followed(client, folder, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (folder.path / "images" / f"{'1' * 32}.png").symlink_to(tmp_path / "secret")
    link = {"name": f"{'1' * 32}.png"}
    assert client.get("/api/runs/smoke/0001/image", params=link).status_code == 404
    (name,) = [each.name for each in (folder.path / "images").iterdir() if not each.is_symlink()]
    assert client.get("/api/runs/smoke/0001/image", params={"name": name}).status_code == 200
    (folder.path / "images").rename(tmp_path / "elsewhere")
    (folder.path / "images").symlink_to(tmp_path / "elsewhere")
    assert client.get("/api/runs/smoke/0001/image", params={"name": name}).status_code == 404


@pytest.mark.slow
def test_a_bundle_has_its_images_as_files(folder, tmp_path):
    store = RunStore(folder.path.parents[1])
    write_bundle(store, tmp_path / "made", keys=["smoke/0001"], stamps=[], trust=False)
    (file,) = (tmp_path / "made" / "data" / "images").iterdir()
    (own,) = (folder.path / "images").iterdir()
    assert file.read_bytes() == own.read_bytes()
    texts = [each.read_text() for each in (tmp_path / "made" / "data").glob("0*.js")]
    assert any(f'"data/images/{file.name}"' in text for text in texts)
    own.unlink()
    write_bundle(store, tmp_path / "again", keys=["smoke/0001"], stamps=[], trust=False)
    assert not [*(tmp_path / "again" / "data" / "images").iterdir()]


def test_a_recording_has_the_images_of_its_episodes(folder, tmp_path):
    to = tmp_path / "recording"
    run_samples.append(folder, run_samples.record(1))
    record(str(folder.path), to, steps=None, runs_dir=folder.path.parents[1])
    (own,) = (folder.path / "images").iterdir()
    assert (to / "images" / own.name).read_bytes() == own.read_bytes()
    (group,) = read_episodes(episodes_path(to, 1))
    assert group.episodes[0].first_observation["screen"].png == own.read_bytes()
