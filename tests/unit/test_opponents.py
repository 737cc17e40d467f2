"""Checkpoints that play against the policy in evaluations of games."""

import pytest
import torch
from fakes import run_config, tiny_policy, trained_tensors

from openenv_pipe.errors import ConfigError
from openenv_pipe.learner.checkpoint import save_weights
from openenv_pipe.pipeline.opponents import check_opponent, load_opponents, opponent_label
from openenv_pipe.runs.checkpoints import StageStep, new_checkpoint

STEP = StageStep("grpo", 3)


def saved(folder, policy):
    """Write a checkpoint of the policy and return its folder."""
    with new_checkpoint(folder, STEP) as path:
        save_weights(path, policy, steps=3, warm_start_steps=0)
    return folder / "checkpoints" / STEP.name


def against(opponent, lora_rank=0):
    fields = {"turn": "turn", "rewards": "rewards", "league": None}
    players = {"roles": {"x": "policy", "o": "policy"}, **fields}
    return run_config(
        {
            "env.players": players,
            "env.baselines": {"fixed": "some.module:function"},
            "eval.opponent": str(opponent),
            "model.lora.rank": lora_rank,
        }
    )


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_an_opponent_has_the_checkpoints_weights_and_the_policy_keeps_its_own(tmp_path, lora_rank):
    earlier, policy = (tiny_policy(lora_rank=lora_rank) for _ in range(2))
    with torch.no_grad():
        for values in trained_tensors(earlier):
            values += 1.0
    before = [values.clone() for values in trained_tensors(policy)]
    folder = saved(tmp_path, earlier)
    (folder.parent / "best").symlink_to(STEP.name)
    config = against(folder.parent / "best", lora_rank)
    ((name, opponent),) = load_opponents(config, policy).items()
    assert name == config.eval.opponent
    pairs = zip(trained_tensors(opponent), trained_tensors(earlier), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    pairs = zip(trained_tensors(policy), before, strict=True)
    assert all(torch.equal(now, then) for now, then in pairs)
    assert opponent_label(config) == str(folder)  # of no run: its own folder, and not the link
    assert str(folder) in check_opponent(config)


def test_a_scripted_opponent_loads_nothing():
    assert load_opponents(against("fixed"), tiny_policy()) == {}
    assert opponent_label(against("fixed")) == "fixed"


def test_what_cannot_play_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"eval.opponent=.*no folder of a checkpoint.*\(fixed\)"):
        check_opponent(against(tmp_path))
    policy = tiny_policy()
    adapter = saved(tmp_path / "adapter", tiny_policy(lora_rank=4))
    with pytest.raises(ConfigError, match=r"eval.opponent=.*not of the policy's architecture"):
        load_opponents(against(adapter), policy)
    other = tiny_policy()
    other.tokenizer.add_tokens(["<another>"])
    vocabulary = saved(tmp_path / "vocabulary", policy)
    policy.tokenizer = other.tokenizer
    with pytest.raises(ConfigError, match=r"eval.opponent=.*vocabulary.*'<another>'"):
        load_opponents(against(vocabulary), policy)
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"eval.opponent=.*damaged.*adapter_config.json"):
        check_opponent(against(adapter))
