"""`view`: serve or write the web interface for a run, a sweep or a folder of runs."""

import secrets
from collections.abc import Callable
from pathlib import Path

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.viewer.play_checkpoint import CheckpointPlay
from openenv_pipe.extras.viewer.web.access import LOOPBACK
from openenv_pipe.extras.viewer.web.bundle import write_bundle
from openenv_pipe.extras.viewer.web.comparisons import list_sweeps, show_sweep
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.extras.viewer.web.scoring import TokenScorer
from openenv_pipe.extras.viewer.web.server import build_app, open_socket, serve
from openenv_pipe.runs.find import find_folder, find_run, is_sweep
from openenv_pipe.runs.places import existing_folders

FIRST_PORT = 8090
RUN_PAGE, SWEEP_PAGE = "#/run/", "#/sweep/"  # beginnings of addresses


def view(
    target: str | None,
    *,
    runs_dir: Path | None,
    host: str,
    port: int | None,
    needs_token: bool,
    trust: bool,
    notify: Callable[[str], None],
) -> None:
    """Serve until Ctrl-C, and print the link to the page.

    target: a run, a sweep or a folder of runs; None: all runs. port: None takes one that is free.
    needs_token: whether requests need the random token that is part of the link.
    trust: also plays untrusted runs, and reads tokenizers that their configurations name.

    Raises RunFolderError and ConfigError.
    """
    is_local = host in LOOPBACK or host == "::1"
    if not needs_token and not is_local:
        raise ConfigError(
            f"--no-token with --host {host} would let anybody who can reach this machine use the "
            "viewer; leave out --host or --no-token"
        )
    shown_dir, page, note = find_target(target, runs_dir)
    if note:
        notify(note)
    if not needs_token:
        notify(
            "without a token, every user and every program of this machine can read these runs, "
            "and play them, which runs their code as you"
        )
    token = secrets.token_urlsafe(24) if needs_token else None
    play = CheckpointPlay(shown_dir, trust=trust)
    app = build_app(
        RunStore(shown_dir),
        token=token,
        is_local=is_local,
        trust=trust,
        play=play,
        scorer=TokenScorer(trust=trust),
    )
    listener = open_socket(host, port or FIRST_PORT, is_fixed=port is not None)
    number = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    notify(f"http://{shown}:{number}/{f'?token={token}' if token else ''}{page}")
    serve(app, listener)


def bundle(target: str | None, folder: Path, *, runs_dir: Path | None = None, trust: bool) -> Path:
    """Write the pages of the target as static files, and return the page to open.

    Raises RunFolderError and ConfigError.
    """
    shown_dir, page, _ = find_target(target, runs_dir)
    store = RunStore(shown_dir)
    keys, stamps = store.all_keys(), [each["stamp"] for each in list_sweeps(store)]
    if page.startswith(RUN_PAGE):
        keys, stamps = [page.removeprefix(RUN_PAGE)], []
    elif page.startswith(SWEEP_PAGE):
        stamps = [page.removeprefix(SWEEP_PAGE)]
        keys = [
            key for setting in show_sweep(store, stamps[0])["settings"] for key in setting["runs"]
        ]
    write_bundle(store, folder, keys=keys, stamps=stamps, start=page, trust=trust)
    return folder / "index.html"


def find_target(target: str | None, runs_dir: Path | None) -> tuple[Path, str, str]:
    """Return the folder of runs, the address of the page that shows the target, and a note.

    The note says which other folders have runs, if all runs are shown. Raises RunFolderError.
    """
    if target is None:
        first, *others = existing_folders(runs_dir)
        names = ", ".join(map(str, others))
        note = f"shows the runs in {first}; more are in {names} (--runs-dir)" if others else ""
        return first.resolve(), "", note
    path = find_folder(target, runs_dir)
    if is_sweep(path):
        path = path.resolve()
        return path.parent.parent, f"{SWEEP_PAGE}{path.name}", ""
    if path.is_dir() and not path.is_symlink() and not (path / "run.json").exists():
        return path.resolve(), "", ""
    folder = find_run(target, runs_dir).path.resolve()
    return folder.parent.parent, f"{RUN_PAGE}{folder.parent.name}/{folder.name}", ""
