"""Each extra is one folder: without it, tests of the core and a run pass.

`unit/test_imports.py` shows that the core names no extra.
"""

import multiprocessing
import runpy
import shutil

import pytest
from commands import LIMIT_S, REPOSITORY

from openenv_pipe.registry import extras

# One process imports the libraries, and forks for each extra. It imports nothing of the project.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("pytest", "typer", "torch.distributed.fsdp", "transformers.modeling_layers", "peft"),
        *("matplotlib.figure", "aiohttp", "hydra", "tabulate"),
    ]
)
ALONE = """
import pytest

from openenv_pipe.cli.main import main
from openenv_pipe.registry import extras


def test_the_extra_is_missing_and_a_run_ends():
    assert {extra!r} not in [each.name for each in extras()]
    with pytest.raises(SystemExit, match="^0$"):
        fewer = ["trainer.steps=1", "trainer.warm_start.steps=1", "eval.num_tasks=1"]
        main(["train", "conf=smoke", *fewer, "eval.baselines=false"])
"""
RUN_TESTS = """
import os
import sys

import pytest

folder = os.path.dirname(__file__)
os.chdir(folder)
os.environ["PYTHONPATH"] = sys.path[0] = folder
with open("output", "w") as output:
    for number in (1, 2):
        os.dup2(output.fileno(), number)
options = ["-q", "-x", "-p", "no:cacheprovider", "--assert=plain"]
sys.exit(pytest.main([*options, "tests/unit/test_registry.py", "test_alone.py"]))
"""


@pytest.mark.parametrize("extra", [extra.name for extra in extras()])
def test_the_core_does_without_an_extra(extra, tmp_path):
    for name in ("openenv_pipe", "conf", "envs", "tests"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    shutil.rmtree(tmp_path / "openenv_pipe/extras" / extra)
    shutil.rmtree(tmp_path / "tests/unit/extras" / extra, ignore_errors=True)
    (tmp_path / "test_alone.py").write_text(ALONE.format(extra=extra))
    (tmp_path / "run_tests.py").write_text(RUN_TESTS)
    process = FORKS.Process(target=runpy.run_path, args=(str(tmp_path / "run_tests.py"),))
    process.start()
    process.join(LIMIT_S)
    process.kill()
    process.join()
    assert process.exitcode == 0, (tmp_path / "output").read_text()
    assert list(tmp_path.glob("runs/smoke/0001/metrics.jsonl"))
    assert extra == "report" or list(tmp_path.glob("runs/smoke/0001/report.md"))
