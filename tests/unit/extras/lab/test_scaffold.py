"""The files that `env new` writes, and names that it rejects. The integration test uses the
files."""

import sys

import pytest
import yaml

from openenv_pipe.errors import ConfigError
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
        ("smoke", "conf/ has a 'smoke'"),
        ("base", "conf/ has a 'base'"),
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
