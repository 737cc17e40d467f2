"""The files that `env new` writes, and names that it rejects. The integration test uses the
files."""

import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from typer.testing import CliRunner

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.lab.cli import app
from openenv_pipe.extras.lab.scaffold import TEMPLATE, create_environment


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_file_has_the_new_name_in_all_its_forms(folder):
    files = create_environment("odd_one_2", folder)
    assert files == sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        text = path.read_text()
        for form in ("my_env", "MyEnv", "My env"):
            assert form not in text
            assert form not in str(path.relative_to(folder))
        if path.suffix == ".py":
            compile(text, str(path), "exec")
        if path.suffix == ".yaml":
            yaml.safe_load(text)
    package = folder / "envs/odd_one_2"
    assert "class OddOne2Environment" in (package / "server/odd_one_2_environment.py").read_text()
    assert (package / "README.md").read_text().startswith("# Odd one 2\n")


def test_runs_and_caches_stay_out_of_git(folder):
    subprocess.run(["git", "init", "--quiet"], check=True)
    create_environment("odd_one", folder)
    made = (
        ".openenv-pipe/setup.py",
        ".runs/odd_one/0001/run.json",
        "released/odd_one/0001/run.json",
    )
    made += ("runs/odd_one/0001/config.json", ".venv/bin/python", "envs/odd_one/__pycache__/a.pyc")
    files = ("conf/env/odd_one.yaml", "envs/odd_one/rules.py")
    asked = ["git", "check-ignore", *made, *files]
    ignored = subprocess.run(asked, capture_output=True, text=True).stdout.split()
    assert ignored == [*made]
    (folder / ".gitignore").write_text("mine")
    create_environment("odd_two", folder)
    assert (folder / ".gitignore").read_text() == "mine"


def test_the_readme_names_every_file_to_make_ones_own_and_what_a_wheel_leaves_out(folder):
    create_environment("odd_one", folder)
    readme = (folder / "envs/odd_one/README.md").read_text()
    listed = readme.partition("Make it your own")[2]
    package = ("rules.py", "models.py", "server/odd_one_environment.py", "policies.py", "tests/")
    conf = [str(path.relative_to(folder)) for path in sorted((folder / "conf").rglob("*.yaml"))]
    assert [name for name in (*package, *conf) if f"- `{name}`: " not in listed] == []
    assert "delete `discount`" in listed
    (first, *_) = (folder / "envs/odd_one/tests/test_odd_one.py").read_text().splitlines()
    assert "rewrite these tests" in first
    assert "neither `openenv.yaml` nor `conf/`" in readme.partition("## For others")[2]
    setuptools = tomllib.loads((folder / "envs/odd_one/pyproject.toml").read_text())["tool"]
    assert setuptools["setuptools"].keys() == {"packages", "package-dir"}, "no files of data"
    written = yaml.safe_load((folder / "conf/conf/odd_one.yaml").read_text())
    assert written["eval"]["num_tasks"] == 50


def test_the_warm_start_in_the_comment_is_one(folder, monkeypatch):
    create_environment("odd_one", folder)
    path = folder / "conf/conf/odd_one/tiny.yaml"
    text = re.sub(r"^  # (?=warm_start:|  )", "  ", path.read_text(), flags=re.MULTILINE)
    path.write_text(text)
    monkeypatch.chdir(folder)
    trainer = compose(["conf=odd_one"]).config.trainer
    assert trainer.warm_start.steps == 60
    assert trainer.warm_start.source.scripted_policy == "odd_one.policies:perfect"


def test_the_next_steps_play_what_the_trained_model_sees(folder):
    done = CliRunner().invoke(app, ["new", "odd_one"])
    assert done.exit_code == 0
    assert "openenv-pipe env play conf=odd_one" in done.stdout


def test_the_template_is_an_environment_as_openenv_lays_it_out():
    package = TEMPLATE / "envs/my_env"
    for name in ("openenv.yaml", "pyproject.toml", "README.md", "models.py", "client.py"):
        assert (package / name).is_file()
    assert (package / "server/Dockerfile").is_file()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("My-Env", "lowercase"),
        ("2048", "lowercase"),
        ("class", "lowercase"),
        ("_hidden", "lowercase"),
        ("../escape", "lowercase"),
        ("json", "module 'json'"),
        ("torch", "module 'torch'"),
        ("smoke", "conf/ already has the name 'smoke'"),
        ("base", "conf/ already has the name 'base'"),
    ],
)
def test_names_that_cannot_be_are_rejected(folder, name, expected, monkeypatch):
    without_envs = [path for path in sys.path if not path.endswith("envs")]
    monkeypatch.setattr(sys, "path", without_envs)
    with pytest.raises(ConfigError, match=expected):
        create_environment(name, folder)
    assert list(folder.iterdir()) == []


def test_nothing_is_overwritten(folder):
    (folder / "envs/odd_one").mkdir(parents=True)
    with pytest.raises(ConfigError, match="envs/odd_one is there already"):
        create_environment("odd_one", folder)
    (folder / "envs/odd_one").rmdir()
    (folder / "conf/env").mkdir(parents=True)
    (folder / "conf/env/odd_two.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="odd_two"):
        create_environment("odd_two", folder)
    assert [path for path in folder.rglob("*") if path.is_file()] == [
        folder / "conf/env/odd_two.yaml"
    ]
