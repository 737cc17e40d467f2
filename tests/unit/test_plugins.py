"""Plugins: how they are found, what they add to the search path, and what broken ones do."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BaseModel, ValidationError

from openenv_pipe import registry
from openenv_pipe.cli.completion import complete_override
from openenv_pipe.config.compose import compose
from openenv_pipe.config.error_messages import explain_validation
from openenv_pipe.config.schema.registered import RegisteredName
from openenv_pipe.errors import ConfigError
from openenv_pipe.registry import block_types, load
from openenv_pipe.system.plugins import check_plugins, find_plugins
from openenv_pipe.system.resources import conf_dirs, env_dirs, find_env, load_callable, shipped_dir

pytestmark = pytest.mark.slow

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


REGISTERS = """
from openenv_pipe.registry import BlockType, Extra
EXTRA = Extra(name="typed", blocks=(BlockType(**{
    "block": "tracker",
    "type": "csv",
    "config": "typed_plugin.schema:CsvConfig",
    "build": "typed_plugin:build",
    CHANGED
}),))
"""
SCHEMA = """
from typing import Literal
from openenv_pipe.config.schema.tracker import TrackerBlock
class CsvConfig(TrackerBlock):
    type: Literal["csv"]
"""
PYTHON = "openenv_pipe.config.schema.tracker:PythonTrackerConfig"
HOST = "openenv_pipe.config.schema.host:ProcessHostConfig"


def registers(**changed):
    """The source of a plugin's module that registers a tracker, with changed values."""
    lines = "".join(f"{name!r}: {value!r}," for name, value in changed.items())
    return REGISTERS.replace("CHANGED", lines)


def install_typed(site, extra):
    install(site, "typed", "typed_plugin", files=[("conf/tracker/typed.yaml", "{}")])
    write(site / "typed_plugin/__init__.py")
    write(site / "typed_plugin/schema.py", SCHEMA)
    write(site / "typed_plugin/extra.py", extra)


@pytest.fixture
def _forgotten():
    """Modules of the plugin are imported anew."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "typed_plugin"]:
        del sys.modules[name]


@pytest.mark.usefixtures("_forgotten")
def test_a_plugin_registers_types_of_blocks(site):
    install_typed(site, registers())
    assert block_types("tracker")["csv"].build == "typed_plugin:build"
    assert "csv" not in block_types("host")
    assert [plugin.problem for plugin in check_plugins()] == [""]


UNUSABLE = {
    "an error": ("1 / 0", r"typed_plugin\.extra:EXTRA raised ZeroDivisionError"),
    "an exit": ("import sys; sys.exit(3)", r"typed_plugin\.extra:EXTRA raised SystemExit: 3"),
    "another object": ("EXTRA = 7", r"EXTRA is 7; expected an openenv_pipe\.registry\.Extra"),
    "no entries": (
        "from openenv_pipe.registry import Extra\nEXTRA = Extra(name='typed', blocks=('a',))",
        r"`blocks` of EXTRA is \('a',\); expected a tuple of openenv_pipe\.registry\.BlockType",
    ),
    "a number as text": (registers(type=7), r"`blocks` of EXTRA is .*whose values are texts"),
    "an unknown block": (registers(block="trackr"), "there is no block 'trackr'; expected one of"),
    "a taken name": (
        registers(type="python", config=PYTHON),
        r"trackers\.python:build_python_tracker is registered under this name; expected",
    ),
    "no such class": (
        registers(config="typed_plugin.nope:A"),
        r"tracker\.type=csv: config='typed_plugin\.nope:A': there is no such module; expected",
    ),
    "no such name": (
        registers(config="typed_plugin.schema:A"),
        r"tracker\.type=csv: typed_plugin\.schema:A raised AttributeError",
    ),
    "no builder": (
        registers(build="typed_plugin.nope.at_all:build"),
        r"tracker\.type=csv: build=.* raised ModuleNotFoundError: No module named 'typed_pl",
    ),
    "a function without its module": (registers(check="check"), "check='check': there is no such"),
    "a class of another block": (
        registers(type="process", config=HOST),
        r"tracker\.type=process: config=.*expected a subclass of .*tracker:TrackerBlock",
    ),
    "another name in the class": (
        registers(type="tsv"),
        r"its `type` is typing\.Literal\['csv'\]; expected Literal\['tsv'\]",
    ),
    "keys of a name": (
        registers(block="engine.launch", type="slurm"),
        r"engine\.launch\.type=slurm: config='typed_plugin\.schema:CsvConfig': this block has no",
    ),
}


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize("name", UNUSABLE)
def test_a_plugin_that_registers_something_unusable_is_named(site, name):
    extra, problem = UNUSABLE[name]
    install_typed(site, extra)
    with pytest.raises(
        ConfigError, match=rf"the plugin 'typed' \(typed-package 1\.2\) cannot be used: .*{problem}"
    ) as rejected:
        block_types("tracker")
    assert str(rejected.value).endswith("; fix or uninstall the plugin")
    (plugin,) = check_plugins()
    assert re.search(problem, plugin.problem)


@pytest.mark.usefixtures("_forgotten")
def test_a_builder_of_a_plugin_that_cannot_be_imported_is_named(site):
    install_typed(site, registers())
    with pytest.raises(ConfigError, match="typed_plugin:build raised AttributeError"):
        load(block_types("tracker")["csv"].build)


@pytest.mark.usefixtures("_forgotten")
def test_a_plugin_registers_a_launch_by_its_name(site):
    install_typed(site, registers(block="engine.launch", type="slurm", config=""))

    class Launch(BaseModel):
        launch: Annotated[str, RegisteredName("engine.launch")]

    assert Launch(launch="slurm").launch == "slurm"
    with pytest.raises(ValidationError) as rejected:
        Launch(launch="slrum")
    message = explain_validation(rejected.value, Launch)
    assert re.match(
        r'launch="slrum": expected one of .*managed, attach.*slurm \(did you mean slurm', message
    )


def test_a_launch_of_an_extra_that_is_gone_is_rejected(site, monkeypatch):
    monkeypatch.setattr(registry, "extras", lambda: ())
    assert [*block_types("engine.launch")] == ["managed", "attach"]


ENGINE = """
from typing import Literal
from openenv_pipe.config.schema.engine_base import EngineBlock, EngineCapabilities
from openenv_pipe.registry import BlockType, Extra

EXTRA = Extra(name="typed", blocks=(BlockType(
    block="engine",
    type="fixed",
    config="typed_plugin.extra:FixedEngineConfig",
    build="typed_plugin.engine:open_fixed",
    check="typed_plugin.extra:check_fixed",
),))


class FixedEngineConfig(EngineBlock):
    capabilities = EngineCapabilities(
        takes="messages", can_train=False, is_exact=False, publishes_in_flight=True
    )
    type: Literal["fixed"]
    reply: str


def check_fixed(config):
    return f"it replies {config.engine.reply}"
"""
OPENED = """
import sys
from contextlib import nullcontext
from openenv_pipe.engines.base import StaticEngine, TextReply


class FixedEngine(StaticEngine):
    max_episodes = sys.maxsize

    def __init__(self, config):
        self.capabilities, self._reply = config.capabilities, config.reply

    async def generate(self, request):
        return TextReply(text=self._reply)


def open_fixed(parts):
    return nullcontext(FixedEngine(parts.config.engine))
"""


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["eval", "conf=smoke"], 0, "fixed"),
        (["train", "conf=smoke"], 2, "engine=fixed: it cannot train"),
    ],
)
def test_a_plugin_registers_an_engine(site, tmp_path, command, code, says):
    install(site, "typed", "typed_plugin")
    write(site / "typed_plugin/__init__.py")
    write(site / "typed_plugin/extra.py", ENGINE)
    write(site / "typed_plugin/engine.py", OPENED)
    write(site / "typed_plugin/conf/engine/fixed.yaml", "type: fixed\nreply: a\n")
    result = subprocess.run(
        [sys.executable, "-m", "openenv_pipe.cli.main", *command, "engine=fixed"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{site}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == code, result.stdout + result.stderr
    assert says in re.sub(r"\s+", " ", result.stdout + result.stderr)
