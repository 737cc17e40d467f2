"""Checkpoints that play against the policy in evaluations of games."""

import json

import pytest
import run_samples
import torch
from fakes import run_config, tiny_policy, trained_tensors

from openenv_pipe.commands.evaluate import evaluate
from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.learner.checkpoint import save_weights
from openenv_pipe.pipeline.opponents import check_opponent, load_opponents, opponent_label
from openenv_pipe.pipeline.run import RunControl
from openenv_pipe.runs.checkpoints import StageStep, new_checkpoint, write_digests

STEP = StageStep("grpo", 3)


def saved(folder, policy):
    """Write a checkpoint of the policy and return its folder."""
    with new_checkpoint(folder, STEP) as path:
        save_weights(path, policy, steps=3, warm_start_steps=0)
    return folder / "checkpoints" / STEP.name


def against(opponent, lora_rank=0, **changes):
    fields = {"turn": "turn", "rewards": "rewards", "league": None}
    players = {"roles": {"x": "policy", "o": "policy"}, **fields}
    return run_config(
        {
            "env.players": players,
            "env.baselines": {"fixed": "some.module:function"},
            "eval.opponent": opponent and str(opponent),
            "model.lora.rank": lora_rank,
            "model.lora.alpha": 8.0,
            **changes,
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
    assert name == config.eval.opponent == str(folder)  # and not the link
    pairs = zip(trained_tensors(opponent), trained_tensors(earlier), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    pairs = zip(trained_tensors(policy), before, strict=True)
    assert all(torch.equal(now, then) for now, then in pairs)
    assert opponent_label(config) == str(folder)  # of no run: its own folder
    assert str(folder) in check_opponent(config)


def test_a_scripted_opponent_loads_nothing():
    assert load_opponents(against("fixed"), tiny_policy()) == {}
    assert opponent_label(against("fixed")) == "fixed"


def test_what_cannot_play_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"eval.opponent=.*neither the folder of a checkpoint.*\(fixed\)"
    ):
        check_opponent(against(tmp_path))
    policy = tiny_policy()
    adapter = saved(tmp_path / "adapter", tiny_policy(lora_rank=4))
    with pytest.raises(ConfigError, match=r"eval.opponent=.*with model.lora.rank=4,.* has 0"):
        load_opponents(against(adapter), policy)
    with pytest.raises(ConfigError, match=r"eval.opponent=.*with model.lora.rank=0,.* has 4"):
        load_opponents(against(saved(tmp_path / "full", policy), 4), tiny_policy(lora_rank=4))
    other = tiny_policy()
    other.tokenizer.add_tokens(["<another>"])
    vocabulary = saved(tmp_path / "vocabulary", policy)
    policy.tokenizer = other.tokenizer
    with pytest.raises(ConfigError, match=r"eval.opponent=.*vocabulary.*'<another>'"):
        load_opponents(against(vocabulary), policy)
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"eval.opponent=.*damaged.*adapter_config.json"):
        check_opponent(against(adapter))


def test_an_adapter_of_other_settings_is_rejected_wherever_it_lies(tmp_path):
    """Its tensors fit, so that it would play in silence, and not as it was trained."""
    adapter = saved(tmp_path, tiny_policy(lora_rank=4))
    config = against(adapter, 4, **{"model.lora.alpha": 64.0})
    with pytest.raises(ConfigError, match=r"eval.opponent=.*model.lora.alpha=8.0,.* has 64.0"):
        check_opponent(config)
    hub = compose(["conf=echo", "model=hub", f"model.path={tmp_path}"]).config.model.model_dump()
    hub["lora"] |= {"rank": 4, "alpha": 8.0}
    written = adapter / "adapter_config.json"
    values = json.loads(written.read_text()) | {"base_model_name_or_path": "some/base"}
    written.write_text(json.dumps(values))
    write_digests(adapter)
    with pytest.raises(ConfigError, match=rf"model.path='some/base',.* has '{tmp_path}'"):
        check_opponent(against(adapter, 4, model=hub))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"model.max_length": 4096, "model.activation_checkpointing": True}, None),
        ({"model.seed": 5}, "model.seed=0, and the policy has 5"),
        ({"model.lora.alpha": 64.0}, "model.lora.alpha=8.0, and the policy has 64.0"),
        (
            {"model.lora.target_modules": ["q_proj"]},
            r"model.lora.target_modules='all-linear', and the policy has \['q_proj'\]",
        ),
    ],
)
def test_an_adapter_is_compared_with_the_model_of_its_run(tmp_path, changes, problem):
    made = run_samples.create(tmp_path, against(None, 4, runs_dir=str(tmp_path)))
    config = against(saved(made.path, tiny_policy(lora_rank=4)), 4, **changes)
    if problem is None:
        assert made.record.id in check_opponent(config)
        return
    with pytest.raises(ConfigError, match=f"eval.opponent=.*{problem}"):
        check_opponent(config)


def test_a_relative_checkpoint_and_a_link_are_resolved_when_the_run_begins(tmp_path, monkeypatch):
    first = tmp_path / "one" / "step_000001"
    first.mkdir(parents=True)
    (first.parent / "best").symlink_to(first.name)
    monkeypatch.chdir(tmp_path)
    config = against("one/best")
    (first.parent / "best").unlink()
    monkeypatch.chdir("/")
    again = RunConfig.model_validate(config.model_dump())
    assert config.eval.opponent == again.eval.opponent == str(first)


def test_eval_rejects_an_opponent_before_it_makes_a_folder(tmp_path):
    control = RunControl()
    runs_dir, opponent = f"runs_dir={tmp_path}", f"eval.opponent={tmp_path}/none/x"
    with pytest.raises(ConfigError, match=r"eval.opponent=.*neither the folder of a checkpoint"):
        evaluate(["conf=tic_tac_toe", runs_dir, opponent], ["eval"], control, trust=False)
    assert list(tmp_path.iterdir()) == []
    made = run_samples.create(tmp_path, compose(["conf=tic_tac_toe", runs_dir]).config)
    saved(made.path, tiny_policy())
    with pytest.raises(ConfigError, match=r"eval.opponent=.*neither the folder of a checkpoint"):
        evaluate([str(made.path), opponent], ["eval"], control, trust=False)
    assert not (made.path / "logs" / "eval").exists()
