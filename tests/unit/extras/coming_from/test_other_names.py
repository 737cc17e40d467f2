"""Keys by the names that other trainers have for them, and the page about these."""

import re
from pathlib import Path

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.config.diff import flat
from openenv_pipe.config.schema_keys import known_keys
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.coming_from.names import LOSS_TYPES, NOT_HERE, OTHER_NAMES

PAGE = Path(__file__).parents[4] / "docs" / "coming_from.md"
CALLED = "what other trainers call .* is "


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.num_generations=8", f"{CALLED}trainer.group_size here"),
        ("trainer.optimizer.learning_rate=1e-5", f"{CALLED}trainer.optimizer.lr here"),
        ("epsilon_high=0.28", f"{CALLED}trainer.loss.clip_high here"),
        ("trainer.loss_type=dr_grpo", "loss_type=dr_grpo is trainer=grpo trainer.loss.normalise="),
        ("trainer.loss_type=vespo", "loss_type=vespo has no equivalent here"),
        ("trainer.loss_type=other", f"{CALLED}trainer.loss.type here"),
        ("trainer.loss_mode=gspo", f"{CALLED}trainer=gspo here"),
        ("trainer.per_device_train_batch_size=8", "tokens_per_batch here, in tokens, not rows"),
        ("max_completion_length=64", "max_reply_tokens here, for each reply; env.max_episode_tok"),
        ("max_prompt_length=64", "prompts have no limit of their own: env.max_episode_tokens"),
        ("trainer.warmup_ratio=0.1", "lr_warmup_steps here, in steps of the optimizer, not as a"),
        ("trainer.gradient_accumulation_steps=4", "episodes, and trainer.tokens_per_batch of the"),
        ("trainer.packed_sequence_length=8192", "is trainer.tokens_per_batch here"),
        (
            "trainer.truncated_importance_sampling=2",
            "here, with trainer.loss.correction.type=trunc",
        ),
        ("trainer.importance_sampling_level=sequence", "type here, gspo has one ratio for each"),
        ("reward_funcs=my_rewards:close", "is a term of the reward, reward.terms.NAME"),
        ("trainer.num_train_epochs=2", "only steps are counted: trainer.steps"),
        ("trainer.loss.type=dr_grpo", r"'python'; TRL's loss_type=dr_grpo is trainer=grpo tr"),
        ("trainer.loss.type=rloo", r"'python'; trainer=rloo chooses it"),
        ("trainer=vespo", "sapo; TRL's loss_type=vespo has no equivalent here"),
        ("trainer=bnpo", "sapo; TRL's loss_type=bnpo is trainer=grpo trainer.loss.normalise=token"),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_the_own_one(override, expected):
    with pytest.raises(ConfigError, match=expected):
        compose(["conf=echo", override])


def test_the_names_of_other_trainers_stand_for_keys_and_are_none_themselves():
    known = set(known_keys())
    assert set(OTHER_NAMES.values()) <= known
    assert not {key.rpartition(".")[2] for key in known} & {*OTHER_NAMES, *NOT_HERE}


def test_the_page_about_other_trainers_names_keys_that_exist():
    page = PAGE.read_text()
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    blocks = "(?:env|eval|trainer|model|engine)"
    named = {key for cell in cells for key in re.findall(rf"`({blocks}\.[\w.]+)", cell)}
    assert len(named) > 30
    known = [f"{key}." for key in known_keys()]
    assert {key for key in named if not any(each.startswith(f"{key}.") for each in known)} == set()


def changed_keys(*overrides):
    """What the overrides change in trainer=grpo, as the lines that would do it."""
    trainers = (compose(["conf=echo", *each]).config.trainer for each in ((), overrides))
    before, after = (flat(each.model_dump(mode="json"), "trainer") for each in trainers)
    return {f"{key}={value}" for key, value in after.items() if before.get(key) != value}


@pytest.mark.parametrize("name", ["dr_grpo", "dapo"])
def test_the_answer_to_a_loss_of_trl_names_all_that_the_preset_changes(name):
    loss, _, more = str(LOSS_TYPES[name]).partition("; ")
    alone, preset = changed_keys(*loss.split()), changed_keys(f"trainer={name}")
    assert alone < preset
    assert {each for each in preset - alone if each not in more} == set()


def test_the_answer_to_cispo_has_the_bound_of_the_preset():
    bound = compose(["conf=echo", "trainer=cispo"]).config.trainer.loss.clip_high
    assert f"clip_high={bound}, TRL's epsilon_high={1 + bound:g}" in str(LOSS_TYPES["cispo"])
