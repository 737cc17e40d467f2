"""`env inspect ... model=...` of a real server: what it writes composes, passes `check`, trains."""

import contextlib
import json
from pathlib import Path

import pytest
import yaml
from families import make_family
from test_train import SMALL, run
from wild_envs import write_packages

from openenv_pipe.config.compose import compose
from openenv_pipe.runs.episodes import read_episodes

ECHO = Path(__file__).parents[2] / "envs/echo"
MINE = """
defaults: [hub, _self_]
path: ./model
dtype: float32
autocast: float32
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an environment and what `env inspect` writes for a model of a hub's form."""
    folder = tmp_path_factory.mktemp("inspected")
    write_packages(folder)
    make_family(folder / "model", "LlamaConfig")
    (folder / "conf/model").mkdir(parents=True)
    (folder / "conf/model/mine.yaml").write_text(MINE)
    model = ("model=mine", "model.lora.rank=0")
    code, out, err = run(
        folder, "env", "inspect", "./envs/market", *model, "-o", "conf/env/market.yaml"
    )
    assert code == 0, out + err
    assert "wrote conf/env/market.yaml, conf/conf/market.yaml, conf/conf/market/mine.yaml" in err
    assert "nobody has tried whether the model writes usable replies" in err
    return folder


def test_the_files_are_for_this_model(folder):
    block = yaml.safe_load((folder / "conf/env/market.yaml").read_text())
    examples = [json.loads(each["reply"]) for each in block["adapter"]["examples"]]
    assert examples
    assert all(each["side"] in ("buy", "sell") and 1 <= each["amount"] <= 10 for each in examples)
    experiment = yaml.safe_load((folder / "conf/conf/market.yaml").read_text())
    assert {"override /model": "mine"} in experiment["defaults"]
    own = yaml.safe_load((folder / "conf/conf/market/mine.yaml").read_text())
    assert own["model"] == {"lora": {"rank": 0}}
    assert own.keys() == {"env", "model"}, "rates follow from the model's kind"
    assert not (folder / "conf/conf/market/tiny.yaml").exists()


def test_it_passes_check_and_trains_as_written(folder):
    code, out, err = run(folder, "check", "conf=market", *SMALL)
    assert code == 0, out + err
    fewer = ("trainer.steps=1", "trainer.tasks_per_step=2", "trainer.group_size=2")
    code, _, err = run(folder, "train", "conf=market", *fewer, "eval.num_tasks=2", *SMALL)
    assert code == 0, err
    step = folder / "runs/market/0001/episodes/step_000001.jsonl.gz"
    assert len(list(read_episodes(step))) == 2


def test_another_model_gets_a_file_beside_the_first(folder):
    (folder / "conf/model/other.yaml").write_text(MINE)
    paths = ("conf/env/market.yaml", "conf/conf/market.yaml", "conf/conf/market/mine.yaml")
    before = [(folder / path).read_bytes() for path in paths]
    command = ("env", "inspect", "./envs/market", "model=other", "-o", "conf/env/market.yaml")
    code, out, err = run(folder, *command)
    assert code == 0, out + err
    assert "wrote conf/conf/market/other.yaml\n" in err
    assert "train conf=market model=other" in err
    assert [(folder / path).read_bytes() for path in paths] == before
    own = yaml.safe_load((folder / "conf/conf/market/other.yaml").read_text())
    with contextlib.chdir(folder):
        env = compose(["conf=market", "model=other"]).config.env
    assert own["env"]["max_reply_tokens"] == env.max_reply_tokens
    code, _, err = run(folder, *command)
    assert code == 2
    assert "conf/conf/market/other.yaml exists; name another file or model" in err


def test_the_splits_that_a_server_lists_are_written(folder):
    code, out, err = run(folder, "env", "inspect", str(ECHO), "-o", "conf/env/letters.yaml")
    assert code == 0, out + err
    assert "400 of the split 'train', 100 of the split 'eval'" in err
    assert yaml.safe_load((folder / "conf/env/letters.yaml").read_text())["tasks"] == {
        "train": {"num_tasks": 400, "index_key": "index", "reset": {"split": "train"}},
        "eval": {"num_tasks": 100, "index_key": "index", "reset": {"split": "eval"}},
    }


def test_seeds_that_may_draw_training_tasks_are_a_warning(folder):
    text = (folder / "conf/env/market.yaml").read_text()
    assert "eval tasks may be training tasks" in text
    assert yaml.safe_load(text)["tasks"] == {
        "train": {"num_tasks": 1000},
        "eval": {"num_tasks": 100},
    }


def test_what_is_wrong_with_the_model_is_said_before_the_server_starts(folder):
    for overrides, expected in {
        ("model=hub_",): "hub",
        ("model=hub", "model.path=./nothing"): "model.path='./nothing'",
    }.items():
        code, _, err = run(folder, "env", "inspect", "./envs/market", *overrides)
        assert (code, expected in err) == (2, True), err
        assert "starting the server" not in err and "Traceback" not in err
    code, _, err = run(folder, "env", "inspect", "./envs/none", "model=hub", "model.path=./model")
    assert code == 2 and "envs/none" in err
