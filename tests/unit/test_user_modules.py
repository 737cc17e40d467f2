"""Modules of the user in a process that outlives their edits, such as a notebook's."""

import importlib
import sys
from types import ModuleType

import pytest

from openenv_pipe.errors import ConfigError
from openenv_pipe.system import user_modules
from openenv_pipe.system.resources import load_callable
from openenv_pipe.system.user_modules import current_modules

NAMES = ("used_here", "using_here", "spaced_here")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(user_modules, "_known", {})
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


def write(folder, number, name="used_here.py"):
    (folder / name).write_text(f"def own():\n    return {number}\n")
    importlib.invalidate_caches()


def now(target="used_here:own"):
    """Return what the function returns in new work."""
    with current_modules():
        return load_callable(target)()


def test_work_has_the_modules_as_they_are_when_it_begins(folder):
    (folder / "using_here.py").write_text("from used_here import own\n")
    write(folder, 1)
    with current_modules():
        assert load_callable("used_here:own")() == load_callable("using_here:own")() == 1
        write(folder, 2)
        with current_modules():
            assert load_callable("used_here:own")() == 1, "other work shares its modules"
    with current_modules():
        assert load_callable("used_here:own")() == load_callable("using_here:own")() == 2


def test_what_a_notebook_has_imported_before_may_be_an_earlier_version(folder):
    (folder / "using_here.py").write_text("from used_here import own\n")
    write(folder, 1)
    importlib.import_module("using_here")
    write(folder, 2)
    assert now("using_here:own") == 2


def test_modules_that_have_not_changed_stay_as_they_are(folder):
    write(folder, 1)
    assert now() == 1
    with current_modules():
        before = load_callable("used_here:own")
    sys.modules["used_here"].LIMIT = 5
    with current_modules():
        assert load_callable("used_here:own") is before
    assert sys.modules["used_here"].LIMIT == 5


def test_a_folder_without_an_init_file_is_forgotten_with_its_modules(folder):
    (folder / "spaced_here").mkdir()
    (folder / "spaced_here/using.py").write_text("from spaced_here import used\nown = used.own\n")
    write(folder, 1, "spaced_here/used.py")
    assert now("spaced_here.using:own") == 1
    write(folder, 2, "spaced_here/used.py")
    assert now("spaced_here.using:own") == 2


def test_what_was_removed_from_a_module_is_gone(folder):
    write(folder, 1)
    assert now() == 1
    (folder / "used_here.py").write_text("def other(): ...\n")
    with current_modules(), pytest.raises(ConfigError, match="there is no 'own'"):
        load_callable("used_here:own")


def test_a_module_that_failed_is_tried_again_with_what_it_imports(folder):
    write(folder, 1)
    (folder / "using_here.py").write_text("from used_here import own\n1 / 0\n")
    with current_modules(), pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_callable("using_here:own")
    write(folder, 2)
    (folder / "using_here.py").write_text("from used_here import own\n")
    assert now("using_here:own") == 2


def test_an_environment_of_a_checkout_is_the_users_too(folder):
    """`env new` writes it beside those that are shipped."""
    (folder / "envs/spaced_here").mkdir(parents=True)
    (folder / "conf").mkdir()
    write(folder, 1, "envs/spaced_here/policies.py")
    assert now("spaced_here.policies:own") == 1
    write(folder, 2, "envs/spaced_here/policies.py")
    assert now("spaced_here.policies:own") == 2


def test_a_module_that_is_imported_when_it_is_asked_is_left_alone(folder, monkeypatch):
    """As those of transformers are, of which some need packages that are not there."""

    class Lazy(ModuleType):
        def __getattr__(self, name):
            raise ModuleNotFoundError(f"{name} needs torchvision")

    monkeypatch.setitem(sys.modules, "lazy_here", Lazy("lazy_here"))
    write(folder, 1)
    assert now() == 1
