"""A run on an environment with images: kept once each, and the same after a kill and a resume."""

import json
import re
import sys
from pathlib import Path

import PIL.Image
import pytest

from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.runs.evals import read_reports
from tests.crash_matrix import Result, killed_and_resumed, uninterrupted

# Two colours alternate, so many frames are equal. The reward is 1 for a reply with an even code.
SERVER = """
import asyncio, base64, io, json, sys
from http import HTTPStatus
import PIL.Image
from websockets.asyncio.server import serve

def health(connection, request):
    if request.path == "/health":
        return connection.respond(HTTPStatus.OK, "fine")

def frame(seed, number):
    colour = [50 * (seed % 3), 100, 200 * (number % 2)]
    if number % 2:
        file = io.BytesIO()
        PIL.Image.new("RGB", (40, 32), tuple(colour)).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()
    return [[colour] * 40] * 32

async def play(connection):
    number = seed = 0
    async for text in connection:
        message = json.loads(text)
        if message["type"] == "state":
            await connection.send(json.dumps({"type": "state", "data": {}}))
            continue
        number = 0 if message["type"] == "reset" else number + 1
        seed = message["data"]["seed"] if number == 0 else seed
        reward = float(ord((message["data"].get("text") or "?")[0]) % 2 == 0)
        observation = {"text": f"{seed}", "frame": frame(seed, number)}
        data = {"observation": observation, "reward": reward / 2, "done": number == 2}
        await connection.send(json.dumps({"type": "observation", "data": data}))

async def main():
    async with serve(play, "127.0.0.1", int(sys.argv[1]), process_request=health) as server:
        await server.serve_forever()

asyncio.run(main())
"""
BLOCK = """
defaults: [base, _self_]
name: images
command: {command}
max_turns: 3
max_reply_tokens: 4
max_episode_tokens: 300
adapter:
  first: "{{{{ text }}}} {{{{ frame }}}}"
  following: "{{{{ frame }}}}"
  pattern: "(?s)^(?P<text>.*)$"
tasks: {{train: {{num_tasks: 50}}, eval: {{num_tasks: 4}}}}
"""
RUN = (
    *("conf=smoke", "name=images", "env=images", "device=cpu", "num_threads=1"),
    *("eval.baselines=false", "eval.num_tasks=2", "trainer.warm_start.steps=0", "trainer.steps=2"),
    *("trainer.tasks_per_step=3", "trainer.checkpoint.every=1", "trainer.max_staleness=1"),
)


def write_block(folder: Path) -> None:
    """Write the environment's block where `train` looks for it."""
    (folder / "conf/env").mkdir(parents=True)
    command = json.dumps([sys.executable, "-c", SERVER, "{port}"])
    (folder / "conf/env/images.yaml").write_text(BLOCK.format(command=command))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The uninterrupted run."""
    home = tmp_path_factory.mktemp("whole")
    write_block(home)
    return uninterrupted(home, RUN, "images").folder


def test_each_image_is_kept_once_and_episodes_name_it(whole):
    files = {path.name for path in (whole / "images").iterdir()}
    groups = read_episodes(episodes_path(whole, 2))
    seen = [each["frame"] for g in groups for e in g.episodes for each in e.observations]
    assert len(seen) == 36 and 1 < len(files) <= 6
    assert {each["image"].removeprefix("images/") for each in seen} <= files
    for image in seen:
        with PIL.Image.open(whole / image["image"]) as file:
            assert file.size == (40, 32)
    assert "trained" in read_reports(whole)
    for page in (whole / "report.md", whole / "eval" / "trained.md"):
        (path, *_) = re.findall(r"!\[image 1\]\((\S+)\)", page.read_text())
        assert (page.parent / path).is_file()


def test_killed_and_resumed_it_is_the_same_run(whole, tmp_path):
    """With groups that were played ahead, whose images are part of a checkpoint."""
    write_block(tmp_path)
    trial = killed_and_resumed(tmp_path, RUN, "images", [(1, 0.0)])
    assert len(trial.kills) == 1
    assert not any(trial.codes), trial.said
    assert Result.of(trial.folder).difference(Result.of(whole)) is None
    assert any(trial.folder.glob("checkpoints/*/resume/images/*.png"))
