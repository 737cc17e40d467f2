"""What extras bring is found in their folders, exists, and costs nothing until it is used."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import openenv_pipe
from openenv_pipe.cli import main as main_module
from openenv_pipe.config.schema.agent import AgentConfig, SandboxConfig
from openenv_pipe.config.schema.cluster import ClusterConfig
from openenv_pipe.config.schema.engine import EngineConfig
from openenv_pipe.config.schema.host import HostConfig
from openenv_pipe.config.schema.judge import JudgeConfig
from openenv_pipe.config.schema.reward import TermConfig
from openenv_pipe.config.schema.source import SourceConfig
from openenv_pipe.config.schema.tracker import TrackerConfig
from openenv_pipe.core import BASES, CORE
from openenv_pipe.registry import extras, functions, load
from openenv_pipe.system.plugins import check_type

pytestmark = pytest.mark.slow

FOLDER = Path(openenv_pipe.__file__).parent / "extras"
BLOCKS = [block for extra in (CORE, *extras()) for block in extra.blocks]


def test_each_folder_of_extras_is_an_extra_of_its_name():
    folders = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))
    assert [extra.name for extra in extras()] == folders


@pytest.mark.parametrize("extra", extras(), ids=lambda extra: extra.name)
def test_the_targets_of_an_extra_exist_in_its_own_folder(extra):
    blocks = [
        target
        for each in extra.blocks
        for target in (each.config, each.build, each.check, each.trial)
    ]
    commands = [command.target for command in extra.commands]
    hooks = [
        extra.prepare,
        extra.report,
        extra.curves,
        extra.eval_page,
        extra.on_episodes,
        extra.rules,
    ]
    hooks += [extra.unused, extra.devices, extra.made_model, extra.multirun, extra.vision]
    hooks += [extra.fast_sampling, extra.other_names]
    for target in filter(None, [*blocks, *commands, *extra.functions, *hooks]):
        assert target.startswith(f"openenv_pipe.extras.{extra.name}.")
        assert load(target)


def test_the_command_line_has_the_commands_of_extras():
    app = main_module.app
    listed = {each.name for each in (*app.registered_commands, *app.registered_groups)}
    assert {command.name for extra in extras() for command in extra.commands} <= listed


def test_several_runs_need_an_extra_that_runs_sweeps(monkeypatch, capsys):
    monkeypatch.setattr(main_module, "extras", lambda: ())
    with pytest.raises(SystemExit) as ended:
        main_module.main(["train", "-m", "conf=echo", "seed=1,2"])
    assert ended.value.code == 2
    assert "train -m is not supported" in capsys.readouterr().err


def test_functions_of_extras_are_functions_of_the_package():
    for name, target in functions().items():
        assert getattr(openenv_pipe, name) is load(target)
        assert name in dir(openenv_pipe)
        assert name in openenv_pipe.__all__


def test_listing_extras_imports_only_what_describes_them():
    code = (
        "import sys\n"
        "from openenv_pipe.registry import extras\n"
        "names = {'openenv_pipe.errors', 'openenv_pipe.registry', 'openenv_pipe.extras'}\n"
        "names.add('openenv_pipe')\n"
        "names |= {f'openenv_pipe.extras.{extra.name}' for extra in extras()}\n"
        "loaded = {name for name in sys.modules if name.startswith('openenv_pipe')}\n"
        "assert loaded == names, loaded ^ names"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda each: f"{each.block}={each.type}")
def test_a_type_of_a_block_has_a_class_of_its_name_and_a_builder(block):
    check_type(block)
    assert callable(load(block.build))
    assert not block.check or callable(load(block.check))


def test_the_base_class_of_a_block_is_that_of_its_key():
    configs = (
        *(AgentConfig, SandboxConfig, ClusterConfig, EngineConfig),
        *(HostConfig, JudgeConfig, TermConfig, TrackerConfig, SourceConfig),
    )
    annotated = {registered.block: base for base, registered in map(get_args, configs)}
    assert annotated == {block: load(base) for block, base in BASES.items() if base}


def test_no_two_types_of_a_block_have_the_same_name():
    names = [(block.block, block.type) for block in BLOCKS]
    assert len(set(names)) == len(names)
