"""Plugins: how they are found, what they add to the search path, and what broken ones do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openenv_pipe.cli.completion import complete_override
from openenv_pipe.commands.plugins import plugins_table
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.registry import block_types
from openenv_pipe.system.plugins import find_plugins
from openenv_pipe.system.resources import conf_dirs, env_dirs, find_env, load_callable, shipped_dir

ROOT = Path(__file__).parents[2]
EXPERIMENT = """\
# @package _global_
defaults: [override /env: echo, _self_]
name: letters
"""


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def install(folder, name, package, *, files=()):
    """An installed distribution of one package, whose import fails."""
    info = folder / f"{name}-1.2.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1.2\n")
    write(info / "entry_points.txt", f"[openenv_pipe.plugins]\n{name} = {package}\n")
    if files:
        write(folder / package / "__init__.py", "raise RuntimeError('was imported')\n")
    for path, text in files:
        write(folder / package / path, text)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An installation folder on sys.path, and an empty current folder beside it."""
    (tmp_path / "site").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    return tmp_path / "site"


@pytest.fixture
def letters(site):
    files = [
        ("conf/conf/letters.yaml", EXPERIMENT),
        ("conf/trainer/mine.yaml", "defaults: [grpo]\n"),
    ]
    install(site, "letters", "letters_plugin", files=[*files, ("envs/abc/openenv.yaml", "app: x")])
    return site / "letters_plugin"


def test_a_plugins_folders_come_after_ones_own_and_before_the_shipped(letters):
    for name in ("conf", "envs"):
        (Path.cwd() / name).mkdir()
    assert conf_dirs() == [Path.cwd() / "conf", letters / "conf", shipped_dir("conf")]
    assert env_dirs() == [Path.cwd() / "envs", letters / "envs", shipped_dir("envs")]


def test_a_plugins_experiment_composes_and_is_completed(letters):
    composed = compose(["conf=letters", "trainer=mine"])
    assert composed.config.name == "letters"
    assert composed.origins["name"] == letters / "conf/conf/letters.yaml"
    assert "conf=letters" in complete_override("conf=")
    assert "trainer=mine" in complete_override("trainer")
    assert find_env("abc") == letters / "envs/abc"


def test_ones_own_file_comes_before_that_of_a_plugin(letters):
    write(Path("conf/conf/letters.yaml"), EXPERIMENT.replace("name: letters", "name: mine"))
    assert compose(["conf=letters"]).config.name == "mine"


def test_plugins_come_in_the_order_of_their_names(site):
    for name in ("zebra", "adder"):
        files = [("conf/conf/both.yaml", EXPERIMENT.replace("letters", name))]
        install(site, name, f"{name}_plugin", files=files)
    assert [plugin.name for plugin in find_plugins()] == ["adder", "zebra"]
    assert compose(["conf=both"]).config.name == "adder"


BROKEN = {
    "gone": ([], "there is no package 'gone_plugin'"),
    "empty": ([("code.py", "")], "has neither conf/ nor envs/"),
    "greedy": ([("conf/config.yaml", "{}")], "would replace the one that every run starts from"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_told_where_it_is_missed_and_nowhere_else(site, name):
    files, problem = BROKEN[name]
    install(site, name, f"{name}_plugin", files=files)
    assert compose(["conf=echo"]).config.name == "echo"
    said = f"the plugin '{name}' ({name}-package 1.2) cannot be used: "
    for ask in (
        lambda: compose(["conf=its_experiment"]),
        lambda: find_env("its_environment"),
        lambda: load_callable("its_module:function"),
    ):
        with pytest.raises(ConfigError) as rejected:
            ask()
        assert said in str(rejected.value)
        assert problem in str(rejected.value)


def test_a_plugin_that_cannot_be_imported_is_an_error_of_what_needs_it(letters):
    with pytest.raises(ConfigError, match="importing letters_plugin raised RuntimeError: was imp"):
        load_callable("letters_plugin:loss")


def test_the_table_names_what_can_be_typed(letters, site):
    write(letters / "conf/trainer/dapo.yaml", "defaults: [grpo]\n")
    install(site, "gone", "gone_plugin")
    names, versions, brought = (
        list(cells) for cells in zip(*plugins_table(find_plugins()).rows, strict=True)
    )
    assert names == ["gone", "letters", "", "", ""]
    assert versions == ["gone-package 1.2", "letters-package 1.2", "", "", ""]
    assert "cannot be used: there is no package 'gone_plugin'" in brought[0]
    assert brought[1:] == [
        "conf=letters",
        "trainer=dapo (replaces the shipped one)",
        "trainer=mine",
        "env.package=abc",
    ]


@pytest.mark.parametrize(("is_broken", "code"), [(False, 0), (True, 1)])
def test_the_command_lists_plugins_without_importing_them(letters, site, is_broken, code):
    if is_broken:
        install(site, "gone", "gone_plugin")
    result = subprocess.run(
        [sys.executable, "-m", "openenv_pipe.cli.main", "plugins"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{site}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == code, result.stderr
    assert "letters-package 1.2" in result.stdout
    assert "conf=letters" in result.stdout


REGISTERS = """
from openenv_pipe.registry import BlockType, Extra
EXTRA = Extra(name="typed", blocks=(
    BlockType(block="tracker", type="{type}", config="typed_plugin:A", build="typed_plugin:build"),
))
"""


def install_typed(site, extra):
    install(site, "typed", "typed_plugin", files=[("conf/tracker/typed.yaml", "{}")])
    write(site / "typed_plugin/__init__.py")
    write(site / "typed_plugin/extra.py", extra)


@pytest.fixture
def _forgotten():
    """Modules of the plugin are imported anew."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "typed_plugin"]:
        del sys.modules[name]


@pytest.mark.usefixtures("_forgotten")
def test_a_plugin_registers_types_of_blocks(site):
    install_typed(site, REGISTERS.format(type="csv"))
    assert block_types("tracker")["csv"].build == "typed_plugin:build"
    assert "csv" not in block_types("host")


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (REGISTERS.format(type="python"), "tracker.type=python is registered twice, by .*typed_pl"),
        ("1 / 0", r"the plugin 'typed' .*extra\.py cannot be used: ZeroDivisionError"),
        ("EXTRA = 7", r"EXTRA in .* is 7; expected an openenv_pipe\.registry\.Extra"),
    ],
    ids=["a taken name", "an error", "another object"],
)
def test_a_plugin_that_registers_nothing_usable_is_named(site, extra, problem):
    install_typed(site, extra)
    with pytest.raises(ConfigError, match=problem):
        block_types("tracker")
