"""Run folders of others, and changed ones: nothing that they name runs without trust."""

import shutil
import sys

import pytest
import run_samples

from openenv_pipe import Run
from openenv_pipe.cli.main import main
from openenv_pipe.config.compose import load_values
from openenv_pipe.config.composed_files import open_loader
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.viewer.compare.load import find_runs
from openenv_pipe.reports.runs_table import list_runs
from openenv_pipe.runs import user_key
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.files import digest_of_file, read_json, write_json
from openenv_pipe.system.resources import load_callable, module_in_current_folder

pytestmark = pytest.mark.slow


def change_config(folder: RunFolder, **blocks) -> None:
    """Change keys of config.json without a word in run.json."""
    path = folder.path / "config.json"
    values = read_json(path)
    for block, keys in blocks.items():
        values[block] |= keys
    write_json(path, values, sort_keys=False)


def rejected(folder: RunFolder) -> str:
    with pytest.raises(RunFolderError) as caught:
        RunFolder.open(folder.path).config_to_run()
    return str(caught.value)


def test_an_own_folder_needs_no_trust_wherever_it_lies(tmp_path):
    folder = run_samples.create(tmp_path / "runs")
    assert folder.config_to_run() == folder.with_template_time(
        run_samples.config(tmp_path / "runs")
    )
    shutil.copytree(folder.path, tmp_path / "elsewhere", symlinks=True)
    assert RunFolder.open(tmp_path / "elsewhere").config_to_run()


@pytest.mark.parametrize("name", ["metrics.jsonl", "plots", "eval", "new"])
def test_a_link_in_a_folder_leads_no_run_out_of_it(name, tmp_path):
    folder = run_samples.create(tmp_path / "runs")
    path = folder.path / name
    if path.exists():
        path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    with pytest.raises(RunFolderError, match=f"{name} is a link"):
        RunFolder.open(folder.path).config_to_run(trust=True)


def test_a_folder_of_another_user_says_what_it_names(tmp_path, other_user):
    folder = run_samples.create(tmp_path)
    change_config(folder, env={"command": ["sh", "-c", "touch owned"]})
    terms = read_json(folder.path / "config.json")["reward"]["terms"]
    url = "reward.terms.verifier.source.url=https://elsewhere.example/verify"
    verifier = load_values(open_loader(), ["conf=smoke", "reward=verifier", url])
    checked = verifier["reward"]["terms"]["verifier"]
    change_config(folder, reward={"terms": {**terms, "checked": checked}})
    other_user()
    run_samples.create(tmp_path)  # This user has a key.
    record = read_json(folder.path / "run.json")
    record["config_digest"] = digest_of_file(folder.path / "config.json")
    write_json(folder.path / "run.json", record)
    message = rejected(folder)
    for named in (
        "another user made it",
        "env.command: ['sh', '-c', 'touch owned']",
        "env.baselines.expert: 'wordle.policies:consistent'",
        "reward.terms.checked.source.url: 'https://elsewhere.example/verify'",
        "reward.terms.consistent.target: 'wordle.rewards:consistent_guess'",
        "trainer.warm_start.source.policy: 'wordle.policies:consistent'",
        "--trust",
    ):
        assert named in message
    assert RunFolder.open(folder.path).config_to_run(trust=True).env.command


def test_a_changed_configuration_is_not_trusted(tmp_path):
    folder = run_samples.create(tmp_path)
    change_config(folder, env={"command": ["true"]})
    assert "config.json was changed" in rejected(folder)
    record = read_json(folder.path / "run.json")
    record["config_digest"] = digest_of_file(folder.path / "config.json")
    write_json(folder.path / "run.json", record)
    assert "another user made it" in rejected(folder)


@pytest.mark.parametrize("signature", [None, "", "é", "0" * 64])
def test_a_folder_without_our_signature_is_not_trusted(tmp_path, signature):
    folder = run_samples.create(tmp_path)
    write_json(
        folder.path / "run.json", read_json(folder.path / "run.json") | {"signature": signature}
    )
    assert "is not trusted" in rejected(folder)


def test_a_resumed_run_is_ones_own(tmp_path, other_user):
    folder = run_samples.create(tmp_path)
    other_user()
    folder = RunFolder.open(folder.path)
    config = folder.config_to_run(trust=True)
    folder.begin_attempt(config, command=[], checkpoint=None, changed={}, differences=[])
    assert RunFolder.open(folder.path).config_to_run() == config


def test_the_key_is_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = run_samples.create(tmp_path)
    path = user_key.key_path()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o077 == 0
    assert sorted(each.name for each in path.parent.iterdir()) == ["key", "runs_dirs"]
    path.chmod(0o644)
    assert "others may know the key" in rejected(folder)
    path.chmod(0o600)
    path.write_bytes(b"short")
    assert "is damaged" in rejected(folder)
    monkeypatch.setenv("XDG_STATE_HOME", "state")  # relative: anyone's current folder
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_key.key_path().is_relative_to(tmp_path / "home")


def test_without_a_place_for_the_key_runs_are_made_and_need_trust(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    folder = run_samples.create(tmp_path)
    assert folder.record.signature is None
    assert "it carries no signature" in rejected(folder)


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """The current folder, with a package that the run of `run_samples` did not have there."""
    folder = tmp_path / "cloned"
    (folder / "envs" / "wordle").mkdir(parents=True)
    for name in ("__init__", "policies", "rewards"):
        (folder / "envs" / "wordle" / f"{name}.py").write_text("raise AssertionError('it ran')")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if not each.endswith("/envs")])
    for name in [each for each in sys.modules if each.split(".")[0] == "wordle"]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def test_code_of_the_current_folder_is_rejected_if_the_run_had_none_there(tmp_path, evil):
    (evil / "envs").rename(evil / "other")
    folder = run_samples.create(tmp_path / "runs")
    assert folder.config_to_run()
    (evil / "other").rename(evil / "envs")
    message = rejected(folder)
    assert "code would be loaded from the current folder" in message
    assert str(evil / "envs" / "wordle") in message


def test_code_of_the_current_folder_is_used_if_it_was_so_in_the_run(tmp_path, evil, monkeypatch):
    folder = run_samples.create(tmp_path / "runs")
    assert folder.record.local_code == [str(evil / "envs" / "wordle")]
    assert folder.config_to_run()
    shutil.copytree(evil, tmp_path / "another")
    monkeypatch.chdir(tmp_path / "another")
    assert "code would be loaded from the current folder" in rejected(folder)


def test_a_function_that_a_variable_names_is_code_of_the_current_folder(tmp_path, monkeypatch):
    config = run_samples.config(tmp_path / "runs")
    variables = {
        "QUESTIONS_SCORE": "my_scores:score",
        "GYM_ID": "my_envs:Maze-v0",
        "OTHER": None,
        "URL": "http://x:80",
    }
    env = config.env.model_copy(update={"variables": variables})
    folders = tmp_path / "own", tmp_path / "cloned"
    for folder in folders:
        folder.mkdir()
        for module in ("my_envs", "my_scores"):
            (folder / f"{module}.py").write_text("raise AssertionError('it ran')")
    monkeypatch.chdir(folders[0])
    made = run_samples.create(tmp_path / "runs", config.model_copy(update={"env": env}))
    code = [str(folders[0] / name) for name in ("my_envs.py", "my_scores.py")]
    assert made.record.local_code == code
    assert made.config_to_run()
    monkeypatch.chdir(folders[1])
    assert str(folders[1] / "my_scores.py") in rejected(made)


def test_a_target_from_elsewhere_leaves_the_current_folder_off_the_path(tmp_path, monkeypatch):
    (tmp_path / "nearby.py").write_text("def function(): pass")
    (tmp_path / "bare").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    load_callable("json:loads")
    assert str(tmp_path) not in sys.path
    assert module_in_current_folder("nearby:function") == tmp_path / "nearby.py"
    assert module_in_current_folder("bare.inner:function") == tmp_path / "bare"
    assert module_in_current_folder("json:loads") is None
    load_callable("nearby:function")
    assert str(tmp_path) in sys.path


def test_reading_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "spy.py").write_text("raise AssertionError('it ran')")
    monkeypatch.chdir(tmp_path)
    folder = run_samples.create(tmp_path)
    change_config(folder, trainer={"max_staleness": 2})
    path = folder.path / "config.json"
    values = read_json(path) | {"engine": {"type": "python", "target": "spy:it", "options": {}}}
    write_json(path, values, sort_keys=False)
    assert Run(folder.path).config.engine.type == "python"
    assert [row.status for row in list_runs([tmp_path])] == ["running"]
    (found,) = find_runs([str(folder.path)]).runs
    assert found.settings["engine.target"] == "spy:it"
    assert "engine.target: 'spy:it'" in rejected(folder)


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "RUN"],
        ["train", "--resume", "RUN"],
        ["train", "--fork", "RUN@1"],
        ["reproduce", "RUN"],
        ["reproduce", "RUN", "--replay"],
        ["export", "RUN"],
        ["serve", "RUN"],
    ],
)
def test_every_command_that_acts_on_a_run_asks_for_trust(
    tmp_path, monkeypatch, capsys, arguments, untrusted
):
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in untrusted.path.rglob("*")}
    with pytest.raises(SystemExit) as ended:
        main([each.replace("RUN", str(untrusted.path)) for each in arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert "is not trusted" in said
    assert "env.command: ['touch', 'owned']" in said
    assert "spy:it" in said
    assert {path: path.stat().st_mtime_ns for path in untrusted.path.rglob("*")} == before
    assert not (tmp_path / "owned").exists()


def test_load_policy_asks_for_trust(untrusted):
    with pytest.raises(RunFolderError, match="is not trusted"):
        Run(untrusted.path).load_policy()


@pytest.fixture
def untrusted(tmp_path, other_user) -> RunFolder:
    """A folder that another user made, whose command and functions must not run."""
    (tmp_path / "spy.py").write_text("raise AssertionError('it ran')")
    config = run_samples.config(tmp_path / "runs")
    values = config.model_dump()
    values["env"] |= {"command": ["touch", "owned"], "baselines": {"expert": "spy:it"}}
    config = RunConfig.model_validate(values)
    folder = RunFolder.create(config, overrides=[], command=[])
    other_user()
    return folder
