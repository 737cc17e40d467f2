"""A run on an environment with images: kept once each, and the same after a kill and a resume."""

import re
from functools import partial
from pathlib import Path

import PIL.Image
import pytest

from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.runs.evals import read_reports
from tests.crash_matrix import Result, killed_and_resumed, uninterrupted
from tests.stub_server import write_stub_block

# Two colours alternate, so many frames are equal. The reward is 1 for a reply with an even code.
SERVER = """
import base64, io
import PIL.Image

def frame(seed, number):
    colour = [50 * (seed % 3), 100, 200 * (number % 2)]
    if number % 2:
        file = io.BytesIO()
        PIL.Image.new("RGB", (40, 32), tuple(colour)).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()
    return [[colour] * 40] * 32

async def answer(data, number, seed):
    reward = float(ord((data.get("text") or "?")[0]) % 2 == 0)
    observation = {"text": f"{seed}", "frame": frame(seed, number)}
    return {"observation": observation, "reward": reward / 2, "done": number == 2}
"""
BLOCK = """
max_turns: 3
max_reply_tokens: 4
max_episode_tokens: 300
adapter:
  first: "{{ text }} {{ frame }}"
  following: "{{ frame }}"
  pattern: "(?s)^(?P<text>.*)$"
tasks: {train: {num_tasks: 50}, eval: {num_tasks: 4}}
"""
RUN = (
    *("conf=smoke", "name=images", "env=images", "device=cpu", "num_threads=1"),
    *("eval.baselines=false", "eval.num_tasks=2", "trainer.warm_start.steps=0", "trainer.steps=2"),
    *("trainer.tasks_per_step=3", "trainer.checkpoint.every=1", "trainer.max_staleness=1"),
)
write_block = partial(write_stub_block, name="images", code=SERVER, block=BLOCK)


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
