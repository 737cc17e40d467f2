"""The viewer as files: what is written, and that it has everything that a page asks for."""

import json
import re
import shutil
import subprocess

import pytest
import run_samples

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.viewer import view
from openenv_pipe.extras.viewer.web import bundle as bundles
from openenv_pipe.extras.viewer.web.bundle import EXPORT, IMPORT, MODULES, STATIC, joined_modules
from openenv_pipe.extras.viewer.web.episodes import list_tasks
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.runs.episodes import episodes_path, write_episodes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = run_samples.create(tmp_path_factory.mktemp("runs"))
    run_samples.train(folder, num_steps=2)
    run_samples.evaluate(folder, "trained", 0.6, step=2)
    (folder.logs / "env-0.log").write_text("</script>\u2028\n")
    (folder.logs / "set_aside").mkdir()  # as after a resume from an earlier step
    folder.finish("finished")
    return folder


def read_data(path) -> dict:
    """Return what the scripts of a bundle put, as a page would get it."""
    found = {}
    for file in sorted((path / "data").glob("0*.js")):
        content = re.fullmatch(r"bundle\.put\((\".*?[^\\]\"), (.*)\);\n", file.read_text("ascii"))
        found[json.loads(content[1])] = json.loads(content[2])
    return found


def test_a_bundle_has_what_the_pages_ask_for_and_loads_only_that(folder, tmp_path):
    index = view.bundle(str(folder.path), tmp_path / "out" / "made", trust=False)
    assert index == tmp_path / "out" / "made" / "index.html"
    data = read_data(index.parent)
    run = "/runs/smoke/0001"
    assert set(data) == {
        "/runs",
        "/sweeps",
        run,
        *(f"{run}/{name}" for name in ("curves", "evaluations", "episodes")),
        *(f"{run}/file/train/{step}" for step in (1, 2)),
        f"{run}/file/eval/trained/None",
        f"{run}/log/attempt_1/env-0.log",
    }
    listed = data[f"{run}/episodes"]
    assert len(listed["entries"]) == 2 * 6 + 10 and listed["problems"] == []
    for entry in listed["entries"]:
        step = "None" if entry["step"] is None else entry["step"]
        shown = data[f"{run}/file/{entry['source']}/{step}"][str(entry["line"])]
        assert shown["content"]["task"]["id"] == entry["task"]
        assert len(shown["tokens"]["ids"]) == entry["num_tokens"]
    start, files = (index.parent / "data" / "index.js").read_text().splitlines()
    assert start == 'bundle.start = "#/run/smoke/0001";'
    assert set(json.loads(files.removeprefix("bundle.files = ").removesuffix(";"))) == set(data)
    assert [path.name for path in index.parent.parent.iterdir()] == ["made"], "no other file stays"
    text = index.read_text()
    assert 'type="module"' not in text
    for name in re.findall(r'(?:src|href)="([^"]*)"', text):
        assert (index.parent / name).is_file(), name


def test_evaluations_and_the_last_steps_are_part_of_a_bundle(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "MAX_EPISODES", 13)
    index = view.bundle(str(folder.path), tmp_path / "made", trust=False)
    listed = read_data(index.parent)["/runs/smoke/0001/episodes"]
    assert {each["step"] for each in listed["entries"]} == {None, 2}
    assert "6 others are left out" in listed["problems"][0]


def test_a_file_with_more_episodes_than_a_bundle_takes_is_cut(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "MAX_EPISODES", 2)
    index = view.bundle(str(folder.path), tmp_path / "made", trust=False)
    listed = read_data(index.parent)["/runs/smoke/0001/episodes"]
    assert len(listed["entries"]) == 2
    assert "others are left out" in listed["problems"][0]


def test_why_a_group_was_skipped_is_part_of_a_bundle(folder, tmp_path):
    groups = run_samples.groups(num_groups=1, size=2)
    for each in groups[0].episodes:
        each.reward = 0.5
    path = episodes_path(folder.path, 9)
    write_episodes(path, groups)
    index = view.bundle(str(folder.path), tmp_path / "made", trust=False)
    path.unlink()
    entries = read_data(index.parent)["/runs/smoke/0001/episodes"]["entries"]
    said = {each["skipped"] for each in entries if each["step"] == 9}
    assert said == {"all its episodes have the reward 0.5, so none is better than another"}


ASK = """
global.window = global;
for (const file of process.argv.slice(1)) (0, eval)(require("fs").readFileSync(file, "utf8"));
bundle.tasks("/runs/smoke/0001", {}).then((tasks) => console.log(JSON.stringify(tasks)));
"""


def rounded(tasks):
    return json.loads(json.dumps(tasks), parse_float=lambda text: round(float(text), 9))


@pytest.mark.skipif(shutil.which("node") is None, reason="node is absent")
def test_tasks_of_a_bundle_are_those_of_the_server(tmp_path):
    path = run_samples.create(tmp_path).path
    for step in (0, 1, 2):  # Step 0 has demonstrations.
        groups = run_samples.groups(num_groups=3, seed=step)
        groups[2].episodes[0].unscored = "the judge is silent"
        write_episodes(episodes_path(path, step), groups)
    index = view.bundle(str(path), tmp_path / "made", trust=False)
    scripts = sorted((index.parent / "data").glob("0*.js"))
    (listed,) = (each for each in scripts if '/0001/episodes"' in each.read_text()[:80])
    command = ["node", "-e", ASK, str(STATIC / "bundle.js"), str(listed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = list_tasks(RunStore(tmp_path), "smoke/0001", {})
    assert [len(each["steps"]) for each in expected] == [2, 2, 2]
    assert rounded(json.loads(done.stdout)) == rounded(expected)


def test_a_folder_with_files_is_left_alone(folder, tmp_path):
    (tmp_path / "mine").mkdir()
    view.bundle(str(folder.path), tmp_path / "mine", trust=False)
    with pytest.raises(ConfigError, match="exists already"):
        view.bundle(str(folder.path), tmp_path / "mine", trust=False)
    with pytest.raises(ConfigError, match="cannot be written"):
        view.bundle(str(folder.path), tmp_path / "mine" / "index.html" / "x", trust=False)


def test_all_modules_are_joined_in_an_order_in_which_each_finds_what_it_imports():
    own = {path.name for path in STATIC.glob("*.js")}
    assert own - {*MODULES} == {"bundle.js", "once_more.js", "uPlot.iife.min.js"}
    exports: dict[str, set[str]] = {}
    for name in MODULES:
        text = (STATIC / name).read_text()
        for wanted, module in IMPORT.findall(text):
            assert module in exports, f"{name} imports {module}, which comes later"
            assert set(re.findall(r"\w+", wanted)) <= exports[module], f"{name} from {module}"
        exports[name] = {match[2] for match in EXPORT.finditer(text)}
        assert text.count("import ") == len(IMPORT.findall(text)), name
        assert len(re.findall(r"^export ", text, re.MULTILINE)) == len(exports[name]), name
    assert not re.search(r"^(import|export) ", joined_modules(), re.MULTILINE)
