"""What `env find` lists."""

import subprocess
from pathlib import Path

import pytest
from openenv.discovery import build_catalog, write_catalog

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.lab.find import find_environments

REPOSITORY = "https://github.com/example/many.git"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_package(folder: Path, description: str = "") -> None:
    folder.mkdir(parents=True)
    (folder / "openenv.yaml").write_text(f"name: {folder.name}\nspec_version: 1\n")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    project = f'[project]\nname = "{folder.name}"\nversion = "1"\ndescription = "{description}"\n'
    (folder / "pyproject.toml").write_text(project)


def uses(word: str, catalog: Path | None = None) -> dict[str, str]:
    return {each.name: each.use for each in find_environments(word, catalog)}


def test_shipped_packages_are_chosen_by_their_blocks():
    every = uses("")
    assert every["wordle"] == "env=wordle" and every["gymnasium_env"] == "env=gymnasium"
    assert uses("FIVE-letter") == {"wordle": "env=wordle"}
    assert uses("no such words") == {}


def test_packages_of_the_current_folder_are_chosen_by_name_or_path(folder):
    write_package(folder / "envs/mine", "A purple game")
    write_package(folder / "beside", "Purple too")
    (folder / "other").mkdir()
    assert uses("purple") == {"mine": "env.package=mine", "beside": "env.package=./beside"}


def test_a_package_of_the_current_folder_hides_the_shipped_one(folder):
    write_package(folder / "envs/wordle", "Another one")
    found = [each for each in find_environments("wordle", None) if each.name == "wordle"]
    assert [each.description for each in found] == ["Another one"]


def test_installed_packages_are_chosen_by_their_folder(folder, monkeypatch):
    site = folder / "site"
    write_package(site / "purple_env", "From an index")
    record = site / "openenv_purple-1.dist-info/RECORD"
    record.parent.mkdir()
    record.write_text("purple_env/openenv.yaml,sha256=x,9\npurple_env/deeper/openenv.yaml,,\n")
    (record.parent / "METADATA").write_text("Name: openenv-purple\nVersion: 1\n")
    monkeypatch.syspath_prepend(site)
    assert uses("purple") == {"purple_env": f"env.package={site / 'purple_env'}"}


@pytest.mark.parametrize("manifest", ["[", "- a list", "description: [1]"])
def test_a_broken_manifest_hides_no_package(folder, manifest):
    (folder / "envs/purple").mkdir(parents=True)
    (folder / "envs/purple/openenv.yaml").write_text(manifest)
    (found,) = find_environments("purple", None)
    assert found.description == "its package does not say"


def test_a_catalog_is_searched_by_openenv(folder):
    repository = folder / "many"
    write_package(repository / "envs/chess_env", "Chess against an engine")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *author, *command], cwd=repository, check=True)
    snapshot = build_catalog(
        repository, repository_uri=REPOSITORY, publisher="example.org", namespace="a"
    )
    write_catalog(snapshot, folder / "catalog.json")
    assert uses("chess", folder / "catalog.json") == {
        "chess_env": f"git clone {REPOSITORY}, then env.package=./many/envs/chess_env"
    }
    assert uses("draughts", folder / "catalog.json") == {}


@pytest.mark.parametrize("text", [None, "{}", "not JSON"])
def test_what_is_no_catalog_is_rejected(folder, text):
    if text is not None:
        (folder / "catalog.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--catalog .*catalog\.json: .*openenv catalog build"):
        find_environments("chess", folder / "catalog.json")
