"""The learning rates that a model gets: by its kind and size, unless a key sets one."""

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.config.learning_rates import FULL, LORA, RANDOM, describe_lr, warn_of_lr
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.system.resources import group_options

pytestmark = pytest.mark.slow

SMALL, MIDDLE, LARGE = sorted(FULL)
IN_FULL = "model.lora.rank=0"


def config_with(*overrides: str, conf: str = "reasoning") -> RunConfig:
    return compose([f"conf={conf}", *overrides]).config


def hub(path: str, *overrides: str) -> RunConfig:
    return config_with("model=hub", f"model.path={path}", *overrides)


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", SMALL),
        ("Qwen/Qwen3-0.6B", MIDDLE),
        ("google/gemma-3-1b-it", MIDDLE),
        ("meta-llama/Llama-3.2-1B-Instruct", MIDDLE),
        ("Qwen/Qwen3-4B-Instruct-2507", LARGE),
        ("Qwen/Qwen3-30B-A3B", LARGE),
        ("Qwen/Qwen2.5-7B-Instruct-1M", LARGE),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", LARGE),
        ("/models/32B/my-360M/", SMALL),
        ("./agent7bis", MIDDLE),
        ("no-size", MIDDLE),
    ],
)
def test_the_rate_follows_the_size_in_the_name(path, size):
    for rates, overrides in ((LORA, []), (FULL, [IN_FULL])):
        trainer = hub(path, *overrides).trainer
        assert (trainer.optimizer.type, trainer.optimizer.lr) == ("adamw", rates[size].lr)
        assert trainer.warm_start.optimizer.lr == rates[size].supervised_lr


@pytest.mark.parametrize("conf", sorted(set(group_options("conf")) - {"harbor", "client", "sft"}))
def test_every_experiment_trains_a_pretrained_model_at_a_rate_that_fits_it(conf):
    judged = conf in ("coding_judge", "email_search_ruler")
    judge = ["judge.model=some-model", "judge.api_key=null"] if judged else []
    config = config_with("model=smollm2_135m", *judge, conf=conf)
    assert (config.trainer.optimizer.type, config.trainer.optimizer.lr) == ("adamw", FULL[SMALL].lr)
    assert warn_of_lr(config) is None
    assert "the default, for pretrained weights in full (0.135 billion" in describe_lr(config)


def test_a_rate_of_the_user_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/conf").mkdir(parents=True)
    own = "# @package _global_\ndefaults: [{override /env: echo}]\nname: mine\n"
    own += "trainer: {optimizer: {lr: 4.0e-6}}\n"
    (tmp_path / "conf/conf/mine.yaml").write_text(own)
    assert config_with("model=smollm2_135m", conf="mine").trainer.optimizer.lr == 4e-6
    by_line = config_with("model=smollm2_135m", "trainer.optimizer.lr=7e-6", conf="mine")
    assert by_line.trainer.optimizer.lr == 7e-6
    assert "GRPO: adamw 7e-06 (default 1e-05), for pretrained" in describe_lr(by_line)
    line = "trainer.optimizer.lr=1e-5"
    as_default = describe_lr(config_with("model=smollm2_135m", line, conf="mine"), [line])
    assert "GRPO: adamw 1e-05, set on the command line and the default, for pretr" in as_default
    # Of the same name as a shipped one, whose block for the tiny model stays below it.
    (tmp_path / "conf/conf/echo.yaml").write_text(own)
    optimizer = config_with(conf="echo").trainer.optimizer
    assert (optimizer.type, optimizer.lr) == ("muon", 4e-6)


@pytest.mark.parametrize(
    ("overrides", "is_risky"),
    [
        (["trainer.optimizer.lr=1e-4", IN_FULL], False),
        (["trainer.optimizer.lr=1.1e-4", IN_FULL], True),
        (["trainer.optimizer.lr=1e-3"], False),
        (["trainer.optimizer.lr=2e-3", "trainer.optimizer.type=muon"], True),
        (["trainer.optimizer.lr=2e-3", "trainer.optimizer.type=muon", "trainer.steps=0"], False),
    ],
)
def test_a_rate_that_destroys_a_pretrained_model_is_warned_of(overrides, is_risky):
    found = warn_of_lr(hub("org/name-135M", *overrides))
    assert (found is not None) is is_risky
    if found:
        assert "destroy the pretrained model" in found
        assert f"{overrides[0]} with" in found.replace("0.00011", "1.1e-4").replace("0.002", "2e-3")


def test_a_supervised_rate_is_warned_of_where_there_is_such_a_stage():
    high = "trainer.warm_start.optimizer.lr=1e-2"
    model = ("model=hub", "model.path=org/name-7B")
    assert warn_of_lr(config_with(*model, high, conf="wordle")) is None
    stage = ("trainer.warm_start.steps=1", "trainer.warm_start.source.policy=module:function")
    found = warn_of_lr(config_with(*model, high, *stage, conf="wordle"))
    assert found and "trainer.warm_start.optimizer.lr=0.01 with" in found


def test_random_weights_keep_what_teaches_them():
    assert config_with(conf="smoke").trainer.optimizer.lr == RANDOM.lr
    tiny = config_with().trainer.optimizer
    assert (tiny.type, tiny.lr) == ("muon", 2e-3)
    assert warn_of_lr(config_with()) is None
