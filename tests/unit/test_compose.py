"""Composition: search path, origins of values, and errors that name the next action."""

from pathlib import Path

import pytest
import yaml

from openenv_pipe.config.compose import amend, compose
from openenv_pipe.config.diff import flat
from openenv_pipe.config.render import as_yaml
from openenv_pipe.config.schema_keys import known_keys
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.resources import shipped_dir

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to an empty folder, away from the checkout."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def rejection(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


# --- what composes -----------------------------------------------------------------------------


def test_later_choices_win_experiment_over_group_and_command_line_over_both(folder):
    assert compose(["conf=echo"]).config.trainer.optimizer.lr == 4e-3
    config = compose(["conf=echo", "trainer.optimizer.lr=2e-3", "env.variables.A=1"]).config
    assert config.trainer.optimizer.lr == 2e-3
    assert config.env.variables == {"A": "1"}


def test_a_choice_on_the_command_line_beats_the_experiments(folder):
    config = compose(["conf=echo", "env=wordle"]).config
    assert (config.name, config.env.name) == ("echo", "wordle")


def test_the_tiny_model_gets_the_short_prompts_and_others_the_long_ones(folder):
    assert compose(["conf=wordle"]).config.env.adapter.system is None
    config = compose(["conf=wordle", "model=hub", "model.path=somewhere"]).config
    assert "Wordle" in config.env.adapter.system


def test_own_files_come_first_and_need_no_config_yaml_of_their_own(folder):
    write(
        folder / "conf/conf/mine.yaml",
        "# @package _global_\ndefaults:\n  - override /env: maze\n  - _self_\nname: mine\n",
    )
    write(folder / "conf/env/maze.yaml", "defaults: [echo, _self_]\nname: maze\nmax_turns: 3\n")
    write(folder / "conf/tracker/none.yaml", "mine: {type: tensorboard}\n")
    composed = compose(["conf=mine"])
    assert composed.config.env.name == "maze"
    # from the shipped file that the user's file builds on
    assert composed.config.env.package == "echo"
    assert [*composed.config.tracker] == ["mine"]
    shipped = shipped_dir("conf")
    origins = {
        "env.adapter.type": shipped / "env/adapter/text.yaml",
        "env.reset_timeout_s": shipped / "env/base.yaml",
        "env.package": shipped / "env/echo.yaml",
        "env.name": folder / "conf/env/maze.yaml",
        "env.max_turns": folder / "conf/env/maze.yaml",
        "name": folder / "conf/conf/mine.yaml",
        "tracker.mine.type": folder / "conf/tracker/none.yaml",
    }
    assert {key: composed.origins[key] for key in origins} == origins


def test_the_origin_of_a_key_is_the_last_file_or_override_that_sets_it(folder):
    shipped = shipped_dir("conf")
    prompts = "env/prompts/wordle@env=tiny"
    lines = ["conf=wordle", "trainer.steps=3", "model=tiny", "seed=4", prompts]
    lines.append("reward.terms.mine={type: env, weight: 1.0, per_turn: false, use: sum}")
    composed = compose(lines)
    origins = {
        "trainer.group_size": shipped / "conf/wordle.yaml",
        "trainer.loss.type": shipped / "trainer/loss/clipped.yaml",
        "trainer.steps": "trainer.steps=3",
        "seed": "seed=4",
        "model.type": shipped / "model/tiny.yaml",
        "env.adapter.following": shipped / "env/prompts/wordle/tiny.yaml",
        "reward.terms.mine.weight": lines[-1],
    }
    assert {key: composed.origins[key] for key in origins} == origins
    assert composed.overrides[:2] == ("conf=wordle", "trainer.steps=3")


def test_a_run_has_one_experiment_and_interpolations_are_resolved(folder):
    config = compose(["conf=wordle", "name=seed-${seed}", "seed=7"]).config
    assert (config.env.name, config.name) == ("wordle", "seed-7")
    assert "names several experiments" in rejection("conf=[echo,wordle]")


def test_an_engine_that_is_not_exact_gets_a_correction(folder):
    def correction(*overrides):
        return compose(["conf=wordle", *overrides]).config.trainer.loss.correction.model_dump()

    truncate, none = ({"type": kind, "low": 0.5, "high": 2.0} for kind in ("truncate", "none"))
    assert correction("engine=vllm") == correction("engine=vllm", "trainer=rloo") == truncate
    assert correction() == none
    assert correction("engine=scripted", "engine.policy=wordle.policies:consistent") == none
    assert correction("engine=openai", "engine.model=m", "engine.api_key=null") == none
    explicit = "trainer.loss.correction.type=mask"
    assert correction("engine=vllm", explicit)["type"] == "mask"
    assert correction(explicit)["type"] == "mask"
    text = "defaults: [grpo, _self_]\nloss: {correction: {type: geometric}}\n"
    write(folder / "conf/trainer/mine.yaml", text)
    assert correction("engine=vllm", "trainer=mine")["type"] == "geometric"


def test_the_largest_mismatch_is_that_of_the_engine_and_the_precision(folder):
    def limit(*overrides):
        return compose(["conf=wordle", *overrides]).config.trainer.max_mismatch

    assert limit("model.autocast=float32") == 0.02
    assert limit("model.autocast=bfloat16") == 0.2
    assert limit("engine=vllm") == 0.4
    assert limit("engine=vllm", "trainer.max_mismatch=1.5") == 1.5
    saved = compose(["conf=wordle"]).config
    assert amend(saved, ["engine=vllm"]).trainer.max_mismatch == 0.4
    assert amend(saved, ["engine=vllm", "trainer.max_mismatch=1"]).trainer.max_mismatch == 1.0
    own = amend(saved, ["trainer.max_mismatch=1"])
    assert amend(own, ["engine=vllm"]).trainer.max_mismatch == 1.0


def test_a_saved_run_with_another_engine_has_its_correction_and_its_own_values(folder):
    saved = compose(["conf=wordle", "runs_dir='a\\${seed}'"]).config
    assert saved.runs_dir == "a${seed}"
    changed = amend(saved, ["engine=vllm", "env.max_episode_tokens=300"])
    assert changed.trainer.loss.correction.type == "truncate"
    assert (changed.engine.max_model_len, changed.runs_dir) == (300, saved.runs_dir)
    assert amend(changed, ["trainer=gspo"]).trainer.loss.correction.type == "truncate"
    assert amend(changed, ["engine=local"]).trainer == saved.trainer
    explicit = amend(saved, ["engine=vllm", "trainer.loss.correction.type=none"])
    assert explicit.trainer.loss.correction.type == "none"


def test_a_part_of_a_saved_block_cannot_be_chosen_alone():
    """Earlier versions ignored such an override without an error."""
    saved = compose(["conf=echo"]).config
    for override in ("trainer/loss=python", "env/adapter=json"):
        with pytest.raises(ConfigError, match="choose the whole block with it"):
            amend(saved, [override])


def test_composing_twice_gives_the_same_and_writes_nothing(folder):
    assert compose(["conf=wordle"]).config == compose(["conf=wordle"]).config
    assert Path.cwd() == folder
    assert list(folder.iterdir()) == []


def test_shown_yaml_reads_back_as_the_configuration(folder):
    composed = compose(["conf=wordle", "model=qwen3_0_6b", "trainer.steps=3"])
    text = as_yaml(composed)
    assert yaml.safe_load(text) == composed.config.model_dump()
    for line in [
        "steps: 3  # override trainer.steps=3",
        "group_size: 8  # shipped conf/wordle.yaml",
        "reset_timeout_s: 30.0  # shipped env/base.yaml",
    ]:
        assert f"  {line}\n" in text
    assert set(flat(composed.config.model_dump())) <= set(composed.origins)


def test_amend_changes_keys_and_blocks_and_keeps_the_rest(folder):
    saved = compose(["conf=wordle", "trainer.steps=3"]).config
    changed = amend(
        saved, ["engine.policy=wordle.policies:consistent", "engine=scripted", "seed=9"]
    )
    assert changed.engine.policy == "wordle.policies:consistent"
    assert (changed.seed, changed.trainer) == (9, saved.trainer)
    assert amend(saved, []) == saved
    assert amend(saved, ["env=echo", "eval.num_tasks=5"]).env == compose(["conf=echo"]).config.env
    with pytest.raises(ConfigError, match=r"eval\.num_taks"):
        amend(saved, ["eval.num_taks=1"])
    with pytest.raises(ConfigError, match="local, openai, python, scripted"):
        amend(saved, ["engine=warp"])
    with pytest.raises(ConfigError, match="saved run"):
        amend(saved, ["conf=echo"])


# --- what is rejected ---------------------------------------------------------------------------


def test_no_experiment_lists_those_that_there_are(folder):
    write(folder / "conf/conf/mine.yaml", "# @package _global_\nname: mine\n")
    message = rejection("trainer.steps=3")
    assert "game2048, harbor, mine, reasoning" in message
    assert "conf=wordle" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.stpes=3", ["trainer.stpes=3", "did you mean trainer.steps"]),
        ("trainer.lr=3", ["trainer.lr=3", "trainer.optimizer.lr"]),
        ("env.adapter.examples=[{user: a, replly: b}]", ["mean env.adapter.examples.0.reply?"]),
        (
            "env.adapter.examples=[{user: a, assistant: b}]",
            ["env.adapter.examples.0.assistant", "this block has user, reply"],
        ),
        ("modle=tiny", ['modle="tiny"', "did you mean model"]),
        (
            "model=qwen",
            ['model="qwen"', "hub, llama3_2_1b, mistral_small, olmo3_7b", "./conf/model/"],
        ),
        ("model=7", ["model=7", "gemma3_4b, gpt_oss_20b, hub"]),
        ("conf=wordl", ['conf="wordl"', "tic_tac_toe, wordle", "did you mean wordle"]),
        ("model=hub", ["model.path", "model.path=<text>"]),
        ("trainer.optimizer.lr=fast", ['"fast"', "a number, more than 0"]),
        ("trainer.group_size=1", ["trainer.group_size=1", "a whole number, at least 2"]),
        ("trainer.steps=1.5", ["trainer.steps=1.5", "a whole number, at least 0"]),
        ("seed=true", ["seed=true", "a whole number"]),
        ("host.port=0", ["host.port=0", "at least 1, at most 65,535 or null"]),
        ("trainer.loss.type=grppo", ["one of 'grpo', 'gspo', 'cispo'", "did you mean grpo"]),
        ("env.adapter.pattren=x", ["env.adapter.pattren", "did you mean env.adapter.pattern"]),
        ("env.adapter.type=txt", ['env.adapter.type="txt"', "'text', 'json', 'tool'", "mean text"]),
        ("env.adapter.max_turns=3", ["env.adapter.max_turns=3", "did you mean env.max_turns"]),
        ("~env.adapter.type", ["env.adapter.type is missing", "text, json, tool, python"]),
        ("~env.name", ["env.name is missing", "expected text"]),
        (
            "model.path=x",
            ['model.path="x"', "not a key of this type", "hidden_size", "leave out 'model.path=x'"],
        ),
        ("model.lora.target_modules=3", ["target_modules=3", "text or a list of text"]),
        ("reward.terms.new={type: lenght}", ["reward.terms.new.type", "did you mean length"]),
        ("trainer.warm_start.source.policy=x", ['trainer.warm_start.source.policy="x"', "or null"]),
        ("trainer.optimizer=3", ["trainer.optimizer=3", "a block with the keys"]),
        ("eval.num_tasks=10000", ["eval.num_tasks=10000", "env.tasks.eval.num_tasks="]),
        ("name=${sed}", ["name: ${sed}", "did you mean seed"]),
        ("name=${oc.env:NO_SUCH_VARIABLE}", ["name: ", "variable NO_SUCH_VARIABLE is not set"]),
        ("trainer.steps=1,2", ["trainer.steps=1,2", "a run takes one"]),
        ("trainer.steps 3", ["'trainer.steps 3'", "key=value"]),
        ("=3", ["'=3'", "key=value"]),
        ("name=[a", ["'name=[a'", "key=value"]),
        ("hydra.run.dir=x", ["hydra.run.dir=x", "no effect"]),
        ("~env.nome", ["~env.nome: there is no such key to remove", "show conf=NAME"]),
    ],
)
def test_an_override_that_is_wrong_is_explained(folder, override, expected):
    conf = [] if override.startswith("conf=") else ["conf=wordle"]
    message = rejection(*conf, override)
    assert [part for part in expected if part not in message] == []
    assert "pydantic" not in message
    assert "Error" not in message.replace("KeyError", "")


def test_all_problems_are_told_at_once(folder):
    message = rejection("conf=wordle", "trainer.steps=-1", "host.prot=3", "model.dtype=int8")
    assert message.startswith("3 problems")
    for key in ("trainer.steps=-1", "host.prot=3", 'model.dtype="int8"'):
        assert key in message


def test_keys_of_an_own_file_are_explained_too(folder):
    write(folder / "conf/trainer/fast.yaml", "defaults: [grpo, _self_]\ngroup_sise: 4\n")
    assert "did you mean trainer.group_size" in rejection("conf=wordle", "trainer=fast")


@pytest.mark.parametrize(
    ("file", "text", "override", "key", "line"),
    [
        (
            "conf/mine",
            "defaults: [wordle, _self_]\ntrainer:\n  steps: 3\n  loss: {clip_high: 0.3}\n",
            "trainer=sapo",
            "trainer.loss.clip_high",
            5,
        ),
        ("conf/mine", "defaults: [wordle]\nhost: {port: 80}\n", "host=docker", "host.port", 3),
        (
            "trainer/mine",
            "defaults: [grpo, _self_]\nloss:\n  clip_low: 0.1\n",
            "trainer/loss=sapo",
            "trainer.loss.clip_low",
            3,
        ),
    ],
)
def test_a_key_that_fits_no_other_choice_is_named_with_its_file_and_line(
    folder, file, text, override, key, line
):
    is_experiment = file.startswith("conf/")
    write(folder / f"conf/{file}.yaml", f"{GLOBAL if is_experiment else ''}{text}")
    chosen = ["conf=mine"] if is_experiment else ["conf=wordle", "trainer=mine"]
    message = rejection(*chosen, override)
    assert f"conf/{file}.yaml, line {line}, sets it; leave it out with '~{key}'" in message
    compose([*chosen, override, f"~{key}"])


def test_bad_yaml_is_shown_with_file_and_line(folder):
    path = write(folder / "conf/env/mine.yaml", "name: mine\nadapter: [1, 2\ntasks: {}\n")
    message = rejection("conf=echo", "env=mine")
    assert f"{path}, line 3" in message


def test_a_missing_file_of_a_defaults_list_is_named(folder):
    write(folder / "conf/env/mine.yaml", "defaults: [wordel, _self_]\nname: mine\n")
    message = rejection("conf=echo", "env=mine")
    assert "did you mean wordle" in message


def test_known_keys_reach_into_every_type_of_a_block():
    keys = known_keys()
    assert {"model.path", "model.hidden_size", "env.adapter.pattern", "trainer.loss.type"} <= set(
        keys
    )
    assert len(keys) == len(set(keys))


GLOBAL = "# @package _global_\n"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *[("trainer", "dr_grpo"), ("trainer.loss", "sapo"), ("model", "smollm2_135m")],
        *[("env", "wordle"), ("reward", "catch"), ("host", "docker")],
    ],
)
def test_a_block_that_is_the_name_of_a_file_is_answered_with_the_line_that_chooses_it(
    folder, key, name
):
    path = write(folder / "conf/conf/mine.yaml", f"{GLOBAL}defaults: [echo, _self_]\n")
    parents = "".join(f"{' ' * depth}{each}:\n" for depth, each in enumerate(key.split(".")))
    path.write_text(f"{path.read_text()}{parents.rstrip()} {name}\n")
    line = rejection("conf=mine").partition("defaults: ")[2].partition("]")[0]
    write(path, f"{GLOBAL}defaults: {line.replace('[', '[echo, ')}]\n")
    file = shipped_dir("conf") / key.replace(".", "/") / f"{name}.yaml"
    assert file in compose(["conf=mine"]).origins.values()


def test_null_removes_a_term_of_the_reward(folder):
    own = "{env: null, good: {type: success, weight: 1.0, per_turn: false}}"
    write(
        folder / "conf/conf/mine.yaml",
        f"{GLOBAL}defaults: [echo, _self_]\nreward: {{terms: {own}}}\n",
    )
    config = compose(["conf=wordle", "beside.mine.conf=mine"]).config
    beside, config = config.beside["mine"], compose(["conf=mine"]).config
    assert [*config.reward.terms] == ["good"]
    assert [*beside.reward.terms] == ["good"]
    other = compose(["conf=mine", "reward=catch"]).config  # which has no term `env`
    assert [*other.reward.terms] == ["closer", "legal", "good"]
    saved = compose(["conf=echo", "reward=catch"]).config
    assert [*amend(saved, ["reward.terms.env=null"]).reward.terms] == ["closer", "legal"]


def test_null_for_a_term_that_is_not_there_is_rejected(folder):
    message = rejection("conf=echo", "reward.terms.evn=null")
    assert "reward.terms.evn=null" in message
    assert "expected one of env (did you mean env?)" in message
    saved = compose(["conf=echo"]).config
    with pytest.raises(ConfigError, match=r"reward\.terms\.evn=null"):
        amend(saved, ["reward.terms.evn=null"])


def test_the_last_term_of_the_reward_cannot_be_removed(folder):
    assert "expected a mapping" in rejection("conf=echo", "reward.terms.env=null")


@pytest.mark.parametrize(
    ("key", "switch"),
    [("trainer.warm_start", "steps"), ("trainer.loss.kl", "coef"), ("model.lora", "rank")],
)
def test_null_for_a_block_names_the_key_that_switches_it_off(key, switch):
    message = rejection("conf=sums_tiers", f"{key}=null")
    assert f"{key}=null: expected a block" in message
    assert f"; {key}.{switch}=0 switches it off" in message


def test_null_evaluates_never_during_training():
    assert compose(["conf=echo", "eval.during.every=null"]).config.eval.during.every == 0
    with pytest.raises(ConfigError, match=r"eval\.during\.every=-1: expected a whole number"):
        compose(["conf=echo", "eval.during.every=-1"])
