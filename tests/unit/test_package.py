"""How a package's manifest names its app."""

import os
import re
import sys
from contextlib import nullcontext

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.environments.build import build_host, check_host
from openenv_pipe.environments.hosts.factory import creation_error
from openenv_pipe.environments.hosts.package import check_variables, manifest_app
from openenv_pipe.errors import ConfigError

pytestmark = pytest.mark.slow

SMOKE = compose(["conf=smoke"]).config

APP = """
import os
from openenv.core.env_server.http_server import HTTPEnvServer
from openenv.core.env_server.types import Action, Observation


def make():
    if "DATA" not in os.environ:
        raise ValueError("no data at /nowhere")


HTTPEnvServer(make, Action, Observation)
app = None
"""


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "my_env"
    (folder / "server").mkdir(parents=True)
    (folder / "server" / "app.py").touch()
    (folder / "main.py").touch()
    return folder


@pytest.mark.parametrize(
    ("manifest", "app"),
    [
        ("app: server.app:app", "server.app:app"),
        ("app: main:make.app", "main:make.app"),
        ("name: an older manifest", "server.app:app"),
        ("# nothing\n", "server.app:app"),
        ("app: my_env.server.app:app", "server.app:app"),
        ("app: envs.my_env.server.app:app", "server.app:app"),
    ],
)
def test_the_app_is_found_from_inside_the_package(package, manifest, app):
    (package / "openenv.yaml").write_text(manifest)
    assert manifest_app(package) == app


@pytest.mark.parametrize(
    ("manifest", "error"),
    [
        ("app: {", r"{path}, line 1, column 7: .*; indent with spaces"),
        ("name: x\n- app: server.app:app", r"{path}, line 2, column 1: "),
        ("- app", r"{path}: expected keys and values"),
        (b"name: caf\xe9", r"{path}, line 1: not UTF-8"),
        ("version: 2026-13-40", r"{path}: month must be in 1\.\.12.*in quotes"),
        ("app: 8000", r"{path}: app is 8000, expected a string like 'server\.app:app'"),
        ("app: server.app", r"{path}: app is 'server\.app', expected a string like"),
        ("app: [server]", r"{path}: app is \['server'\], expected a string like"),
        ("app: 'server.app:'", r"{path}: app is 'server\.app:', expected a string like"),
        ("app: server.main:app", r"{path}: app is 'server\.main:app', and there is no .*/main\.py"),
        ("app: nowhere:app", r"{path}: app is 'nowhere:app', and there is no .*/nowhere\.py"),
    ],
)
def test_a_damaged_manifest_names_its_file_the_key_and_what_is_expected(package, manifest, error):
    path = package / "openenv.yaml"
    path.write_bytes(manifest if isinstance(manifest, bytes) else manifest.encode())
    with pytest.raises(ConfigError, match=f"^{error.replace('{path}', re.escape(str(path)))}"):
        manifest_app(package)


SCORES = "variables: {SCORE: [exact, number, '*:*']}"


@pytest.mark.parametrize(
    ("manifest", "variables", "error"),
    [
        (SCORES, {"SCORE": "exact", "FOLDER": "x"}, None),
        (SCORES, {"SCORE": "mine:score"}, None),
        (SCORES, {"FOLDER": "x"}, None),
        ("name: x", {"SCORE": "any"}, None),
        (
            SCORES,
            {"SCORE": "nubmer"},
            r"^env\.variables\.SCORE is 'nubmer', expected exact, num",
        ),
        (SCORES, {"SCORE": "nubmer"}, r"\(did you mean number\?\); .*openenv\.yaml lists them"),
        (SCORES, {"SCORE": None}, r"env\.variables\.SCORE is 'exakt', expected exact"),
        ("variables: [SCORE]", {}, r"openenv\.yaml: variables is \['SCORE'\], expected the values"),
        ("variables: {SCORE: exact}", {}, r"variables\.SCORE is 'exact', expected a list"),
        ("variables: {SCORE: [1]}", {}, r"variables\.SCORE is \[1\], .*put numbers, .* quotes"),
    ],
)
def test_variables_have_values_that_the_manifest_lists(
    package, monkeypatch, manifest, variables, error
):
    monkeypatch.setenv("SCORE", "exakt")
    (package / "openenv.yaml").write_text(manifest)
    env = SMOKE.env.model_copy(update={"package": str(package), "variables": variables})
    with nullcontext() if error is None else pytest.raises(ConfigError, match=error):
        check_variables(env)


def test_a_value_that_the_manifest_does_not_list_is_rejected_before_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    misspelt = "env.variables.QUESTIONS_SCORE=nubmer"
    config = compose(["conf=echo", "env=questions", "env.tasks.train.path=x.csv", misspelt]).config
    with pytest.raises(ConfigError, match="QUESTIONS_SCORE is 'nubmer', expected exact, number"):
        check_host(config)
    with pytest.raises(ConfigError, match="QUESTIONS_SCORE is 'nubmer', expected exact, number"):
        build_host(config, tmp_path)


def test_a_package_without_a_manifest_or_its_key_is_served_if_it_has_the_usual_app(package):
    assert manifest_app(package) == "server.app:app"
    (package / "server" / "app.py").unlink()
    with pytest.raises(ConfigError, match=r"has an openenv\.yaml or a server/app\.py"):
        manifest_app(package)
    (package / "openenv.yaml").write_text("name: an older manifest")
    with pytest.raises(ConfigError, match=r"has no key app, and there is no server/app\.py"):
        manifest_app(package)


def test_why_an_environment_cannot_be_created(package):
    (package / "server" / "__init__.py").touch()
    (package / "server" / "app.py").write_text(APP)
    named = f"{package.name}.server.app:app"
    start = ([sys.executable], package, named)
    why = creation_error(*start, os.environ)
    assert why == "ValueError: no data at /nowhere"
    assert creation_error(*start, {**os.environ, "DATA": "here"}) == ""
