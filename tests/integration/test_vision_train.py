"""A small vision-language model of random weights learns to tell two images apart."""

import re
from functools import partial
from pathlib import Path

import PIL.Image
import pytest

from openenv_pipe.environments.images import find_references
from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.runs.evals import read_reports
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.types import IMAGE_IDS
from tests.commands import run
from tests.crash_matrix import Result, killed_and_resumed, uninterrupted
from tests.stub_server import write_stub_block
from tests.vision_models import write_vision_model

# The image is reddish or bluish, and nothing else tells the tasks apart. The reward is 1 for a
# reply with an odd code if it is reddish, and with an even one if not: without eyes, half of that.
SERVER = """
import base64, io, random
from PIL import Image

def frame(seed):
    draw, colour = random.Random(seed), (190, 60, 60) if seed % 2 else (60, 60, 190)
    pixels = bytes(each + draw.randrange(-50, 50) for _ in range(32 * 32) for each in colour)
    file = io.BytesIO()
    Image.frombytes("RGB", (32, 32), pixels).save(file, "WEBP", lossless=True)
    return base64.b64encode(file.getvalue()).decode()

async def answer(data, number, seed):
    if not number:
        return {"observation": {"frame": frame(seed)}, "reward": None, "done": False}
    code = ord((data.get("text") or "?")[0])
    return {"observation": {}, "reward": float(code % 2 == seed % 2), "done": True}
"""
BLOCK = """
max_turns: 1
max_reply_tokens: 1
max_episode_tokens: 100
adapter:
  first: "{{ frame }}"
  following: "{{ frame }}"
  pattern: "(?s)^(?P<text>.*)$"
tasks: {train: {num_tasks: 64}, eval: {num_tasks: 16}}
"""
RUN = (
    *("conf=echo", "name=colours", "env=colours", "reward=env", "model=hub", "model.lora.rank=0"),
    *("model.dtype=float32", "model.autocast=float32", "device=cpu", "num_threads=1"),
    *("host.sessions_per_server=64", "trainer.warm_start.steps=0", "trainer.steps=20"),
    *("trainer.tasks_per_step=8", "trainer.group_size=8", "trainer.checkpoint.every=5"),
    *("trainer.optimizer.type=adamw", "trainer.optimizer.lr=0.02", "trainer.max_staleness=1"),
    *("eval.baselines=false", "eval.greedy=false", "eval.num_tasks=16"),
)
write_block = partial(write_stub_block, name="colours", code=SERVER, block=BLOCK)


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> tuple[str, ...]:
    model = write_vision_model(tmp_path_factory.mktemp("model"))
    return (*RUN, f"model.path={model}")


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory) -> Path:
    """The uninterrupted run."""
    home = write_block(tmp_path_factory.mktemp("whole"))
    return uninterrupted(home, settings, "colours").folder


def test_it_learns_what_only_the_image_tells(whole):
    reports = read_reports(whole)
    assert reports["start"].reward.mean < 0.75
    assert reports["trained"].reward.mean > 0.9
    first, *_ = read_metrics(whole / "metrics.jsonl")
    assert first["mismatch/max"] < 1e-4, "later steps train on groups that were played ahead"
    groups = read_episodes(episodes_path(whole, 20))
    for episode in (each for group in groups for each in group.episodes):
        (image,) = find_references(episode.first_observation)
        seen = [token for token in episode.turns[0].prompt_ids if token >= IMAGE_IDS]
        assert seen == [image.token_id] * 16
        assert len(episode.turns[0].prompt_ids) < 60  # a note and the image, and not its base64


def test_each_image_is_stored_once_and_episodes_and_reports_name_it(whole):
    files = {path.name for path in (whole / "images").iterdir()}
    groups = read_episodes(episodes_path(whole, 2))
    seen = [each["frame"] for g in groups for e in g.episodes for each in e.observations[:1]]
    names = {each["image"].removeprefix("images/") for each in seen}
    assert len(seen) == 64 and len(names) == 8 and names <= files
    for image in seen:
        with PIL.Image.open(whole / image["image"]) as file:
            assert file.size == (32, 32)
    for page in (whole / "report.md", whole / "eval" / "trained.md"):
        (path, *_) = re.findall(r"!\[image 1\]\((\S+)\)", page.read_text())
        assert (page.parent / path).is_file()


def test_killed_and_resumed_it_is_the_same_run(whole, settings, tmp_path):
    """With groups that were played ahead, whose images are part of a checkpoint."""
    trial = killed_and_resumed(write_block(tmp_path), settings, "colours", [(8, 0.0)])
    assert len(trial.kills) == 1
    assert not any(trial.codes), trial.said
    assert Result.of(trial.folder).difference(Result.of(whole)) is None
    assert any(trial.folder.glob("checkpoints/*/resume/images/*"))


def test_it_is_reproduced_from_its_episodes(whole):
    code, out, err = run(whole.parents[1], "reproduce", str(whole), "--replay")
    assert code == 0, out + err


def test_an_adapter_is_trained_and_exported_but_not_served(settings, tmp_path):
    changes = ("model.lora.rank=4", "trainer.steps=2")
    code, out, err = run(write_block(tmp_path), "train", *settings, *changes)
    assert code == 0, out + err
    code, out, err = run(tmp_path, "export", "colours/0001")
    assert code == 0, out + err
    (exported,) = (tmp_path / "runs/colours/0001/export").iterdir()
    assert (exported / "preprocessor_config.json").is_file()
    assert "AutoModelForImageTextToText" in (exported / "README.md").read_text()
    code, out, err = run(tmp_path, "serve", "colours/0001")
    assert code == 2 and "not supported for vision-language models" in err
