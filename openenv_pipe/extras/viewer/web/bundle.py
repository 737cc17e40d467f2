"""Write the viewer as static files, which a browser opens from a disk.

    DIR/index.html      open this
    DIR/static/         the pages; all modules in one script, because files cannot load modules
    DIR/data/           the answers of the server, each a script that a page loads when it needs it
    DIR/data/images/  the images of the observations

A page in a bundle filters episodes itself (`static/bundle.js`). It searches the beginnings of last
replies and errors, not whole texts.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.extras.viewer.episodes.index import EpisodeIndex, file_of
from openenv_pipe.extras.viewer.episodes.query import TRAIN, EpisodeFilter, IndexedEpisode
from openenv_pipe.extras.viewer.web import comparisons, run_page
from openenv_pipe.extras.viewer.web.answers import as_json
from openenv_pipe.extras.viewer.web.episodes import (
    content_of,
    masks_truncated,
    read_image,
    why_skipped,
)
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.extras.viewer.web.summaries import summarise_run
from openenv_pipe.extras.viewer.web.tokens import tokens_of, trained_tokens_of
from openenv_pipe.runs.episodes import read_recorded_episodes
from openenv_pipe.runs.images import FOLDER as IMAGES
from openenv_pipe.system.files import new_folder

STATIC = Path(__file__).parent / "static"
MODULES = (
    *("dom.js", "api.js", "notes.js", "charts.js", "runs_page.js", "run_page.js"),
    *("episodes_page.js", "conversation.js", "tokens.js", "episode_page.js", "play_page.js"),
    *("parallel.js", "compare_page.js", "app.js"),
)
COPIED = ("style.css", "icon.svg", "uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE")
MAX_EPISODES = 5000  # of one run: those of evaluations, then those of the last steps
IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([\w.]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
MODULE_TAG = '<script type="module" src="static/app.js"></script>'
BUNDLE_TAGS = """<script src="static/bundle.js" defer></script>
    <script src="data/index.js" defer></script>
    <script src="static/app.js" defer></script>"""


def write_bundle(
    store: RunStore,
    folder: Path,
    *,
    keys: list[str],
    stamps: list[str],
    start: str = "",
    trust: bool,
) -> None:
    """Write the pages of some runs and sweeps into a new folder.

    start: the address of the page that is shown first, such as #/run/wordle/0007; empty: all runs.
    trust: whether tokenizers of models that an untrusted run names may be read. Raises ConfigError.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--bundle {folder} exists already; name a folder that does not")
    with new_folder(folder, "--bundle") as aside:
        _write_pages(aside)
        answers = _answers(store, keys, stamps, aside, trust=trust)
        _write_data(aside / "data", start, answers)


def _write_pages(folder: Path) -> None:
    (folder / "static").mkdir()
    for name in (*COPIED, "bundle.js"):
        shutil.copyfile(STATIC / name, folder / "static" / name)
    (folder / "static" / "app.js").write_text(joined_modules(), encoding="utf-8")
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert MODULE_TAG in page
    (folder / "index.html").write_text(page.replace(MODULE_TAG, BUNDLE_TAGS), encoding="utf-8")


def joined_modules() -> str:
    """Return all modules as one script, in which each is a function that returns its exports."""
    parts = ['"use strict";\nconst modules = {};']
    for name in MODULES:
        text = (STATIC / name).read_text(encoding="utf-8")
        exported = [match[2] for match in EXPORT.finditer(text)]
        body = IMPORT.sub(r'const \1 = modules["\2"];', EXPORT.sub(r"\1", text))
        parts.append(
            f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {", ".join(exported)} }};\n}})();'
        )
    return "\n".join(parts) + "\n"


def _write_data(folder: Path, start: str, answers: Iterator[tuple[str, Any]]) -> None:
    """Write each answer as a script, and an index of which file has which answer."""
    (folder / IMAGES).mkdir(parents=True)
    files: dict[str, str] = {}
    for number, (name, answer) in enumerate(answers, 1):
        files[name] = f"{number:06d}.js"
        text = f"bundle.put({as_json(name)}, {as_json(answer)});\n"
        (folder / files[name]).write_text(text, encoding="ascii")
    index = f"bundle.start = {as_json(start)};\nbundle.files = {as_json(files)};\n"
    (folder / "index.js").write_text(index, encoding="ascii")


def _answers(
    store: RunStore, keys: list[str], stamps: list[str], bundle: Path, *, trust: bool
) -> Iterator[tuple[str, Any]]:
    yield "/runs", {"runs": [summarise_run(store, key) for key in keys]}
    sweeps = [each for each in comparisons.list_sweeps(store) if each["stamp"] in stamps]
    yield "/sweeps", {"sweeps": sweeps}
    for stamp in stamps:
        yield f"/sweeps/{stamp}", _or_error(comparisons.show_sweep, store, stamp)
    if 1 < len(keys) <= comparisons.MAX_RUNS:
        yield "/compare", _or_error(comparisons.compare_runs, store, {"runs": ",".join(keys)})
    for key in keys:
        try:
            path = store.path(key)
        except PipeError:
            continue  # Its row in the table says why it is unreadable.
        yield from _answers_of_run(store, key, path, bundle, trust=trust)


def _answers_of_run(
    store: RunStore, key: str, path: Path, bundle: Path, *, trust: bool
) -> Iterator[tuple[str, Any]]:
    run = f"/runs/{key}"
    yield run, _or_error(run_page.describe_run, store, key)
    yield f"{run}/curves", run_page.curves(store, key)
    yield f"{run}/evaluations", _or_error(comparisons.show_evaluations, store, {"runs": key})
    for name in run_page.logs_of(path):
        yield f"{run}/log/{name}", {"text": run_page.tail(path, name)}
    yield from _episodes(store, key, path, bundle, trust=trust)


def _or_error(read: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return read(*arguments)
    except (PipeError, OSError) as error:
        return {"error": str(error)}


def _episodes(
    store: RunStore, key: str, path: Path, bundle: Path, *, trust: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the list of a run's episodes, then one answer for each of their files."""
    index = store.index(key)
    by_file, num_left_out = _last_files(index)
    problems = [*index.choices().problems]
    if num_left_out:
        problems.append(
            "This bundle has the episodes of evaluations and of the last steps; "
            f"{num_left_out:,} others are left out."
        )

    def copy_image(name: str) -> str:
        address = f"data/{IMAGES}/{name}"
        with suppress(PipeError, OSError):  # without the file, pages show its size
            if not (bundle / address).exists():
                (bundle / address).write_bytes(read_image(store, key, {"name": name}))
        return address

    has_mask = masks_truncated(store, key)
    entries = [
        {**asdict(entry), "skipped": skipped}
        for listed in by_file.values()
        for entry, skipped in _with_reasons(listed, has_mask=has_mask)
    ]
    yield f"/runs/{key}/episodes", {"entries": entries, "problems": problems}
    for (source, step), listed in by_file.items():
        file = file_of(path, source, step)
        recorded = read_recorded_episodes(file, {e.line for e in listed})
        trained = trained_tokens_of(file)
        yield (
            f"/runs/{key}/file/{source}/{step}",
            {
                each.line: {
                    "content": content_of(each, copy_image, whole=False),
                    "tokens": tokens_of(
                        each, trained.get((each.group, each.episode.member)), path, trust=trust
                    ),
                }
                for each in recorded
            },
        )


def _with_reasons(
    entries: list[IndexedEpisode], *, has_mask: bool
) -> Iterator[tuple[IndexedEpisode, str | None]]:
    """Yield the episodes of a file with the reason why their group was not trained on."""
    groups: dict[str, list[IndexedEpisode]] = {}
    for entry in entries:
        groups.setdefault(entry.group_id, []).append(entry)
    reasons = {name: why_skipped(each, has_mask=has_mask) for name, each in groups.items()}
    yield from ((entry, reasons[entry.group_id]) for entry in entries)


def _last_files(
    index: EpisodeIndex,
) -> tuple[Mapping[tuple[str, int | None], list[IndexedEpisode]], int]:
    """Return the episodes by file, and how many are left out.

    Evaluations come first, which are few and the run's result; then the last steps. A file is left
    out or whole, unless it alone has more than a bundle takes.
    """
    by_file: dict[tuple[str, int | None], list[IndexedEpisode]] = {}
    num_episodes = 0
    entries = index.find(EpisodeFilter(), descending=True, limit=-1)
    for entry in sorted(entries, key=lambda each: each.source == TRAIN):
        file = entry.source, entry.step
        is_begun = 0 < len(by_file.get(file, ())) < MAX_EPISODES
        if num_episodes >= MAX_EPISODES and not is_begun:
            continue
        by_file.setdefault(file, []).append(entry)
        num_episodes += 1
    return by_file, index.count(EpisodeFilter()) - num_episodes
