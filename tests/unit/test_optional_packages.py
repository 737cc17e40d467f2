"""How to install what is missing: by an extra of this package where one brings it."""

import pytest

from openenv_pipe.errors import ConfigError
from openenv_pipe.system import optional_packages
from openenv_pipe.system.resources import load_callable


def test_the_command_fits_a_checkout_and_a_release(tmp_path, monkeypatch):
    monkeypatch.setattr(optional_packages, "CHECKOUT", tmp_path)
    assert optional_packages.how_to_install("open_spiel") == "`pip install 'openenv-pipe[envs]'`"
    (tmp_path / "pyproject.toml").touch()
    assert optional_packages.how_to_install("pyspiel") == f"`pip install -e '{tmp_path}[envs]'`"
    monkeypatch.chdir(tmp_path)
    assert optional_packages.how_to_install("reasoning_gym") == "`pip install -e '.[envs]'`"
    assert optional_packages.how_to_install("something") == "`pip install something`"


def test_a_target_whose_module_lacks_a_package_says_how_to_get_it(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="needs 'no_such_package', which is not installed; `pip"):
        load_callable("needs_more:anything")


def test_only_packages_of_extras_are_required_of_an_environment(tmp_path):
    """Environments of other releases of OpenEnv name packages that are not needed."""
    optional_packages.reject_missing_requirements(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["no-such-package>=1"]\n')
    optional_packages.reject_missing_requirements(tmp_path)
    (tmp_path / "pyproject.toml").write_text("not = TOML")
    optional_packages.reject_missing_requirements(tmp_path)
