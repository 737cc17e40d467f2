"""What `train` rejects, `check` finds: one table of the rejections at the start of a run."""

import importlib.metadata
import re
import resource
import socket
import sys
from pathlib import Path

import pytest
import run_samples
import torch

from openenv_pipe import pipeline
from openenv_pipe.commands.findings import Line, Result, has_failed
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError, HostError, RunFolderError, UserError
from openenv_pipe.extras.check import checks
from openenv_pipe.extras.containers.docker import image
from openenv_pipe.pipeline import start
from openenv_pipe.pipeline.requirements import REQUIREMENTS
from openenv_pipe.pipeline.run import RunControl
from openenv_pipe.pipeline.servers import OwnServers
from openenv_pipe.runs.checkpoints import StageStep, checkpoint_path
from openenv_pipe.runs.folder import RunFolder
from tests.ports import lasting_port

CALLABLES = """
def takes_nothing():
    return 0.0

NUMBER = 7

class Counter:
    def __call__(self, observations):
        return "crane"

counter = Counter()

def make_tracker(folder, *, url):
    raise AssertionError("no tracker is made before there is a run folder")

class Half:
    def __init__(self, *arguments, **options):
        raise AssertionError("no part is made before there is a run folder")

async def later(given):
    return given
"""
RAY = "cluster=ray"
NUM_GPUS = torch.cuda.device_count()
RANGE_KEYS = ("num_tasks", "index_key")
SMOKE = ("conf=smoke", "num_threads=1", "host.sessions_per_server=2", "device=cpu")
FILE = ["env/tasks@env.tasks.train=file", *(f"~env.tasks.train.{key}" for key in RANGE_KEYS)]
REGEX = "+reward.terms.it={type: regex, pattern: '(', weight: 1.0, per_turn: true}"
LORA = "model.lora.rank=2"
TRACKER, HOST = ["tracker=python"], ["host=python", "host.sessions_per_server=2"]
LOSS = ["trainer=grpo", "trainer/loss=python"]
BEST = "trainer.checkpoint.best={metric: reward/mean, direction: max}"
ADVANTAGE = ["trainer=grpo", "trainer/advantage=python"]


def order(name: str) -> str:
    return f"env.tasks.order={{type: python, target: 'mine:{name}', options: {{}}}}"


# The line of `check` that fails, what it says, and the overrides that are rejected. None of them
# needs a server, so `train` leaves no run folder. The first one stands for all of test_rules.py.
REJECTED = [
    (
        *("settings", "2 problems in the configuration:\n  - engine=scripted"),
        ["engine=scripted", "engine.policy=a.b:c", "model.dtype=bfloat16"],
    ),
    ("run folder", "name=", [f"name={'n' * 300}"]),
    ("run folder", "runs_dir='a_file'", ["runs_dir=a_file"]),
    ("run folder", "runs_dir='/proc/runs'", ["runs_dir=/proc/runs"]),
    ("device", "trainer.devices=1000", ["trainer.devices=1000"]),
    ("model", "billion parameters", ["model.num_layers=1000", "model.hidden_size=65536"]),
    ("model", "model.path='./nowhere'", ["model=hub", "model.path=./nowhere"]),
    ("model", "model.path='empty'", ["model=hub", "model.path=empty"]),
    ("model", "model.lora.target_modules='none'", [LORA, "model.lora.target_modules=none"]),
    ("model", "model.lora.target_modules='('", [LORA, "model.lora.target_modules='('"]),
    ("chat", "chat template", ["model.chat_template='{{ 1 / 0 }}'"]),
    ("chat", "chat template", ["model.chat_template='{% if %}'"]),
    ("engine", "engine install vllm --build cpu", ["engine=vllm"]),
    ("ports", "host.port=65535 for 2 servers", ["host.port=65535", "host.num_servers=2"]),
    ("environment", "env.package='wordel'", ["env.package=wordel"]),
    ("environment", "no-such-program", ["env.command=[no-such-program]"]),
    ("environment", "env.python", ["env.python=./no/python"]),
    ("adapter", "env.adapter.pattern", ["env.adapter.pattern='('"]),
    ("adapter", "env.adapter.pattern", ["env.adapter.pattern=crane"]),
    ("adapter", "env.adapter.first", ["env.adapter.first='{% if %}'"]),
    ("adapter", "division by zero", ["env.adapter.unusable='{{ 1 / 0 }}'"]),
    ("adapter", "because", ["env.adapter.unusable='{{ because }}'"]),
    ("tasks", "env.tasks.train.path", [*FILE, "env.tasks.train.path=no.csv"]),
    ("tasks", "'no_such'", ["env.tasks.order={type: python, target: 'mine:no_such', options: {}}"]),
    ("tasks", "mine:Half' makes a Half without take, record", [order("Half")]),
    ("tasks", "too many positional arguments", [order("takes_nothing")]),
    ("tracker", "makes a Path without log", [*TRACKER, "tracker.python.target=pathlib:Path"]),
    ("tracker", "'url'", [*TRACKER, "tracker.python.target=mine:make_tracker"]),
    ("environment", "mine:Half' makes a Half without start", [*HOST, "host.target=mine:Half"]),
    ("environment", "3 arguments", [*HOST, "host.target=mine:takes_nothing"]),
    ("advantage", "is a class", [*ADVANTAGE, "trainer.advantage.target=mine:Half"]),
    ("advantage", "1 argument", [*ADVANTAGE, "trainer.advantage.target=mine:takes_nothing"]),
    ("loss", "an async function", [*LOSS, "trainer.loss.target=mine:later"]),
    ("loss", "'beta'", [*LOSS, "trainer.loss.target=math:sqrt", "trainer.loss.options.beta=1"]),
    ("rewards", "no module 'nowhere'", ["reward.terms.consistent.target=nowhere:f"]),
    ("rewards", "mine:NUMBER", ["reward.terms.consistent.target=mine:NUMBER"]),
    ("rewards", "reward.terms.consistent", ["reward.terms.consistent.target=mine:takes_nothing"]),
    ("rewards", "reward.terms.it.pattern", [REGEX]),
    ("policies", "no module 'nowhere'", ["trainer.warm_start.source.policy=nowhere:f"]),
    ("policies", "'no_such'", ["+env.baselines.it=wordle.policies:no_such"]),
    ("policies", "mine:Counter cannot be called", ["+env.baselines.it=mine:counter"]),
    ("policies", "mine:takes_nothing", ["+env.baselines.it=mine:takes_nothing"]),
]
NEEDS_GPU = pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU; ranks on a CPU share its cores")
NEEDS_NO_GPU = pytest.mark.skipif(NUM_GPUS > 0, reason="device=cuda is there")
OF_DEVICES = [
    pytest.param("device", "device=cuda", ["device=cuda"], marks=NEEDS_NO_GPU),
    pytest.param(
        *("device", "trainer.devices", ["device=cuda", f"trainer.devices={NUM_GPUS + 1}"]),
        marks=NEEDS_GPU,
    ),
]
# These need the environment's server, so the run folder is there and says `failed`.
REJECTED_BY_SERVER = [
    ("env.adapter.pattern", ["env.adapter.pattern='(?P<word>.+)'"]),
    ("lettre", ["env.adapter.first='{{ lettre }}'"]),
    ("division by zero", ["env.adapter.first='{{ 1 / 0 }}'"]),
]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, with a file, an empty folder, and a module `mine`."""
    (tmp_path / "a_file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.py").write_text(CALLABLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where no engine is installed
    return tmp_path


def failed_lines(lines: list[Line]) -> dict[str, str]:
    assert has_failed(lines)  # exit code 1
    return {line.name: line.text for line in lines if line.result is Result.FAIL}


def rejection(overrides: list[str]) -> str:
    """The error of `train`, which ends the command with exit code 2 and no traceback."""
    with pytest.raises(UserError) as caught:
        pipeline.train(compose(overrides), ["openenv-pipe"], RunControl())
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "says", "overrides"), [*REJECTED, *OF_DEVICES], ids=lambda value: str(value)[:60]
)
def test_check_finds_what_train_rejects(folder, monkeypatch, name, says, overrides):
    overrides = [*SMOKE, *overrides]
    with monkeypatch.context() as without_servers:
        without_servers.setattr(checks, "TRIALS", {})
        lines = checks.run_checks(compose(overrides).config)
    assert says in failed_lines(lines)[name]
    assert says in rejection(overrides)
    assert not list(folder.glob("runs/*"))


@pytest.mark.parametrize(("says", "overrides"), REJECTED_BY_SERVER)
def test_check_finds_what_train_rejects_when_the_server_answers(folder, says, overrides):
    overrides = [*SMOKE, *overrides]
    assert says in failed_lines(checks.run_checks(compose(overrides).config))["environment"]
    assert says in rejection(overrides)
    assert RunFolder.open(folder / "runs/smoke/latest").status == "failed"


def test_a_used_port_is_found_before_there_is_a_folder(folder):
    port = lasting_port(2) + 1
    with socket.create_server(("127.0.0.1", port)):
        overrides = [*SMOKE, f"host.port={port - 1}", "host.num_servers=2"]
        with pytest.raises(ConfigError, match=f"port {port} is used"):
            REQUIREMENTS["ports"](compose(overrides).config)
        assert f"port {port} is used by another program" in rejection(overrides)
        vllm = compose([*SMOKE, "engine=vllm", f"engine.port={port}"]).config
        with pytest.raises(ConfigError, match=f"engine.port={port}: port {port} is used"):
            REQUIREMENTS["ports"](vllm)
    assert not list(folder.glob("runs/*"))


def test_more_sessions_than_open_files_are_rejected(folder, monkeypatch):
    config = compose([*SMOKE, "host.sessions_per_server=1000"]).config
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(ConfigError, match=r"needs about 1200 open files.*ulimit -n 1200"):
        REQUIREMENTS["environment"](config)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1200, 4096))
    assert "wordle" in REQUIREMENTS["environment"](config)


def test_a_missing_extra_is_named_before_there_is_a_folder(folder, monkeypatch):
    """A server without `pyspiel` died after 39 seconds, in a run folder."""
    installed = importlib.metadata.version

    def version(name):
        if name == "open_spiel":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    overrides = ["conf=catch", "num_threads=1", "device=cpu", "eval.baselines=false"]
    overrides += ["reward=env", "host.sessions_per_server=2"]
    assert "needs the package open_spiel, which is not installed" in rejection(overrides)
    assert "[envs]'`" in rejection(overrides)
    own_python = compose([*overrides, f"env.python={sys.executable}"]).config
    assert "catch" in REQUIREMENTS["environment"](own_python)
    assert not list(folder.glob("runs/*"))


def test_a_cluster_without_ray_installed_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs the package ray; `pip install .*ray"):
        REQUIREMENTS["cluster"](compose(["conf=smoke", RAY]).config)


def test_an_image_that_cannot_be_built_leaves_no_folder(folder, monkeypatch):
    async def ensure_image(client, recipe, log, timeout_s):
        raise HostError(f"`docker {recipe.arguments[0]}` failed")

    class Daemon:
        def close(self):
            pass

    monkeypatch.setattr(image, "connect", Daemon)
    monkeypatch.setattr(image, "find_image", lambda client, name: None)
    monkeypatch.setattr(image, "ensure_image", ensure_image)
    overrides = [*SMOKE, "host=docker", "host.sessions_per_server=2", "host.network=bridge"]
    with pytest.raises(HostError, match="`docker build` failed"):
        pipeline.train(compose(overrides), ["openenv-pipe"], RunControl())
    assert not list(folder.glob("runs/*"))


def test_a_program_with_a_slash_is_looked_for_where_the_server_starts(folder):
    """A server of a package starts in the folder of the package, not in the user's."""
    (folder / "servers/mine").mkdir(parents=True)
    own = ["env.package=./servers/mine", "env.command=[./serve.sh]"]
    config = compose([*SMOKE, *own]).config
    (folder / "serve.sh").touch(0o755)
    with pytest.raises(ConfigError, match=re.escape(f"not a program in {folder}/servers")):
        REQUIREMENTS["environment"](config)
    (folder / "serve.sh").rename(folder / "servers/serve.sh")
    assert REQUIREMENTS["environment"](config) == "started by ./serve.sh"


def test_a_run_that_has_its_folder_needs_no_place_for_another(folder, monkeypatch):
    """`runs_dir` of a run that was moved, or is read elsewhere, may not be there any more."""
    run_samples.create(folder / "first")
    (folder / "first").rename(folder / "moved")
    (folder / "first").touch()
    attempts = []
    monkeypatch.setattr(start, "run", lambda attempt, control: attempts.append(attempt))
    moved = RunFolder.open(folder / "moved/smoke/0001")
    with pytest.raises(ConfigError, match="runs_dir"):
        REQUIREMENTS["run folder"](moved.config_to_run())
    start.begin(moved, OwnServers(), RunControl())
    start.resume(str(moved.path), [], ["openenv-pipe"], RunControl())
    assert [attempt.folder.path for attempt in attempts] == [moved.path, moved.path]


def test_the_types_of_a_csv_file_are_listed_once_also_if_a_share_of_it_is_held_out(folder):
    rows = "".join(f"{number}+1=,{number + 1},00{number}\n" for number in range(20))
    (folder / "sums.csv").write_text(f"question,answer,code\n{rows}")
    tasks = ["env=questions", "env.tasks.train.path=sums.csv", "eval.num_tasks=1"]
    found = REQUIREMENTS["tasks"](compose(["conf=echo", *tasks]).config)
    assert found == "sums.csv: question (str), answer (int), code (str)"


@pytest.mark.parametrize("change", ["warn -> stop", "stop -> warn", "warn -> back", "back -> warn"])
def test_a_resume_neither_begins_nor_ends_going_back(folder, monkeypatch, change):
    """How often a run has gone back follows from its metrics, and its learning rate from that."""
    before, after = change.split(" -> ")
    config = compose([*SMOKE, f"trainer.guard={before}"]).config
    made = RunFolder.create(config, overrides=(), command=["openenv-pipe"])
    attempts = []
    monkeypatch.setattr(start, "run", lambda attempt, control: attempts.append(attempt))

    def resume():
        given = [f"trainer.guard={after}"]
        start.resume(str(made.path), given, ["openenv-pipe"], RunControl())

    if "back" not in change:
        resume()
        assert [attempt.config.trainer.guard for attempt in attempts] == [after]
        return
    with pytest.raises(ConfigError, match=f"trainer.guard: '{before}' -> '{after}'") as caught:
        resume()
    assert "between warn and stop" in str(caught.value)
    assert str(caught.value).endswith("start a new run (no step of GRPO was saved)")
    for place in StageStep("warm_start", 7), StageStep("grpo", 3):
        checkpoint_path(made.path, place).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"--fork {made.path}@3 KEY=VALUE"):
        resume()
    assert not attempts


@pytest.mark.parametrize(
    ("words", "cause", "remedy"),
    [
        ([], None, "add trainer.steps=4 to train on"),
        (["trainer.guard=stop"], "stopped by trainer.guard=stop", "add trainer.guard=warn to"),
        (["eval.during.every=1", "eval.during.stop.at=0.5"], "stopped early", "stop.at=null to"),
        (["trainer.guard=back", BEST], "stopped by trainer.guard=back", "start a new run: "),
    ],
)
def test_a_finished_run_says_what_lets_it_go_on(folder, words, cause, remedy):
    """More steps do nothing for a run that its guard has ended: it ends there again."""
    config = compose([*SMOKE, "trainer.steps=2", *words]).config
    made = RunFolder.create(config, overrides=(), command=["openenv-pipe"])
    made.finish("finished", cause)
    with pytest.raises(RunFolderError, match="is finished") as caught:
        start.resume(str(made.path), [], ["openenv-pipe"], RunControl())
    assert remedy in str(caught.value) and (cause or "") in str(caught.value)
