"""How a package's manifest names its app."""

import pytest

from openenv_pipe.environments.hosts.package import manifest_app
from openenv_pipe.errors import ConfigError


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
        ("app: my_env.server.app:app", "server.app:app"),
        ("app: envs.my_env.server.app:app", "server.app:app"),
        ("app: nowhere:app", "nowhere:app"),  # Python's own error says what is missing
    ],
)
def test_the_app_is_found_from_inside_the_package(package, manifest, app):
    (package / "openenv.yaml").write_text(manifest)
    assert manifest_app(package) == app


def test_an_app_that_is_none_is_explained(package):
    (package / "openenv.yaml").write_text("app: 8000")
    with pytest.raises(ConfigError, match=r"app is 8000, expected a text like 'server\.app:app'"):
        manifest_app(package)
    (package / "server" / "app.py").unlink()
    (package / "openenv.yaml").write_text("name: an older manifest")
    with pytest.raises(ConfigError, match="app is None"):
        manifest_app(package)
