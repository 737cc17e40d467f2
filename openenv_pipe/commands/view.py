"""`view`: serve or write the web interface for a run, a sweep or a folder of runs."""

import secrets
from collections.abc import Callable
from pathlib import Path

from openenv_pipe.commands.play_checkpoint import CheckpointPlay
from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.find import find_run
from openenv_pipe.viewer.access import LOOPBACK
from openenv_pipe.viewer.bundle import write_bundle
from openenv_pipe.viewer.comparisons import list_sweeps, show_sweep
from openenv_pipe.viewer.run_store import RunStore
from openenv_pipe.viewer.server import build_app, open_socket, serve

FIRST_PORT = 8090
ALL_RUNS = Path("runs")
RUN_PAGE, SWEEP_PAGE = "#/run/", "#/sweep/"  # beginnings of addresses


def view(
    target: str, *, host: str, port: int | None, trust: bool, tell: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C, and tell the address.

    target: a run, a sweep or a folder of runs. port: None takes one that is free.
    host: one that other machines reach needs a token, which is part of the address.
    trust: also plays foreign runs, and reads tokenizers that their configurations name.

    Raises:
        RunFolderError: There is no such run, sweep or folder.
        ConfigError: The port cannot be used.
    """
    runs_dir, page = find_target(target)
    token = None if host in LOOPBACK or host == "::1" else secrets.token_urlsafe(24)
    play = CheckpointPlay(runs_dir, trust=trust)
    app = build_app(RunStore(runs_dir), token=token, trust=trust, play=play)
    listener = open_socket(host, port or FIRST_PORT, is_fixed=port is not None)
    number = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    begin = f"http://{shown}:{number}/"
    tell(f"{begin}?token={token}" if token else f"{begin}{page}")
    serve(app, listener)


def bundle(target: str, folder: Path, *, trust: bool) -> Path:
    """Write the pages of the target as static files, and return the page to open.

    Raises:
        RunFolderError: There is no such run, sweep or folder.
        ConfigError: The folder has files already, or cannot be written.
    """
    runs_dir, page = find_target(target)
    store = RunStore(runs_dir)
    keys, stamps = store.all_keys(), [each["stamp"] for each in list_sweeps(store)]
    if page.startswith(RUN_PAGE):
        keys, stamps = [page.removeprefix(RUN_PAGE)], []
    elif page.startswith(SWEEP_PAGE):
        stamps = [page.removeprefix(SWEEP_PAGE)]
        keys = [
            key for setting in show_sweep(store, stamps[0])["settings"] for key in setting["runs"]
        ]
    write_bundle(store, folder, keys=keys, stamps=stamps, trust=trust)
    return folder / "index.html"


def find_target(target: str) -> tuple[Path, str]:
    """Return the folder of runs, and the address of the page that shows the target.

    Raises:
        RunFolderError: There is no such run, sweep or folder.
    """
    path = Path(target)
    if (path / "sweep.json").is_file() or path.parent.name == "sweeps":
        path = path.resolve()
        return path.parent.parent, f"{SWEEP_PAGE}{path.name}"
    is_run = (path / "run.json").exists() or not path.is_dir() or path.is_symlink()
    if is_run and not (path == ALL_RUNS and not path.exists()):
        folder = find_run(target, ALL_RUNS).path.resolve()
        return folder.parent.parent, f"{RUN_PAGE}{folder.parent.name}/{folder.name}"
    if not path.is_dir():
        raise RunFolderError(
            f"there is no folder {target!r}; `openenv-pipe train conf=wordle` makes the first run, "
            "and `openenv-pipe view DIR` shows those of another folder"
        )
    return path.resolve(), ""
