"""The index of episodes: what it finds, and that it is derived from the files alone."""

import gzip
import json
import sqlite3
import zlib
from contextlib import closing
from pathlib import Path

import pytest
import run_samples

from openenv_pipe.algorithms.advantages import step_advantages
from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.viewer.episodes.index import (
    FILE_NAME,
    EpisodeIndex,
    file_of,
    index_episodes,
)
from openenv_pipe.extras.viewer.episodes.query import EpisodeFilter
from openenv_pipe.runs.episodes import episodes_path, read_episodes, write_episodes
from openenv_pipe.types import Finish, Status

ALL = EpisodeFilter()


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with two steps of 2 groups of 3 episodes, whose replies are told apart by words."""
    (tmp_path / "episodes").mkdir()
    for step in (1, 2):
        groups = run_samples.groups(seed=step)
        for group in groups:
            for each in group.episodes:
                each.reward = step + each.member / 10
                each.success, each.turn_rewards = each.member == 2, []
                for turn in each.turns:
                    turn.finish, turn.reply = Finish.STOP, f"guess{step}x{each.member} ends here"
        advantages = step_advantages(groups, baseline="group", scale="group", discount=1.0)
        write_episodes(episodes_path(tmp_path, step), groups, advantages)
    return tmp_path


def found(folder: Path, wanted: EpisodeFilter = ALL, **order) -> list[tuple[int, str, int]]:
    with EpisodeIndex.open(folder) as index:
        episodes = index.find(wanted, **order)
        assert index.count(wanted) == len(episodes)
        return [(each.step, each.group_id, each.member) for each in episodes]


def test_it_has_what_the_files_have(folder):
    with EpisodeIndex.open(folder) as index:
        indexed = index.find(ALL)
    episodes = [
        (step, group, each)
        for step in (1, 2)
        for group in read_episodes(episodes_path(folder, step))
        for each in group.episodes
    ]
    assert len(indexed) == len(episodes) == 12
    for entry, (step, group, each) in zip(indexed, episodes, strict=True):
        assert (entry.source, entry.step, entry.group_id) == ("train", step, group.id)
        assert (entry.task, entry.member) == (each.task.id, each.member)
        assert (entry.reward, entry.terms) == (each.reward, each.reward_terms)
        assert (entry.status, entry.success) == (each.status, each.success)
        assert (entry.num_turns, entry.num_tokens) == (len(each.turns), each.num_tokens)
        assert entry.is_truncated is each.truncated
        assert entry.advantage == pytest.approx(each.member - 1, abs=0.01)
        assert entry.preview == f"guess{step}x{each.member} ends here"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"first_step": 2}, {(2, g, m) for g in (0, 1) for m in range(3)}),
        ({"last_step": 1, "task": "eval/1"}, {(1, 1, m) for m in range(3)}),
        ({"task_id": "eval/1"}, {(s, 1, m) for s in (1, 2) for m in range(3)}),
        ({"task_id": "eval/"}, set()),
        ({"group": "1/0", "success": True}, {(1, 0, 2), (2, 0, 2)}),
        ({"reward_from": 1.1, "reward_to": 2.0}, {(1, g, m) for g in (0, 1) for m in (1, 2)}
         | {(2, 0, 0), (2, 1, 0)}),
        ({"reward_from": 1.2, "reward_below": 2.0}, {(1, 0, 2), (1, 1, 2)}),
        ({"reward_term": "consistent", "reward_to": 0.2}, set()),
        ({"status": "error"}, set()),
        ({"is_truncated": True}, set()),
        ({"has_unusable": True}, set()),
        ({"source": "eval/trained"}, set()),
        ({"text": "guess1x1"}, {(1, 0, 1), (1, 1, 1)}),
        ({"text": "GUESS2X0 ends h"}, {(2, 0, 0), (2, 1, 0)}),
        ({"text": "ends guess2x0"}, {(2, 0, 0), (2, 1, 0)}),  # of one turn and the next
        ({"text": 'here" OR "x'}, set()),
        ({"text": "\x00 ... !"}, set()),
        ({"text": "(*:^"}, set()),
    ],
)  # fmt: skip
def test_filters(folder, wanted, expected):
    expected = {(step, f"1/{group}", member) for step, group, member in expected}
    if wanted.get("text") == "ends guess2x0":
        expected = set()  # "here" and the marks of the observation stand between
    assert set(found(folder, EpisodeFilter(**wanted))) == expected


def test_order_limit_and_offset(folder):
    worst = found(folder, order="reward")
    assert worst[:2] == [(1, "1/0", 0), (1, "1/1", 0)]
    assert found(folder, order="reward", descending=True)[0] == (2, "1/0", 2)
    with EpisodeIndex.open(folder) as index:
        pages = [index.find(ALL, order="reward", limit=5, offset=at) for at in (0, 5, 10)]
    assert [(e.step, e.group_id, e.member) for page in pages for e in page] == worst


def test_episodes_without_a_reward_come_last_and_are_within_no_bounds(folder):
    groups = run_samples.groups(num_groups=1, seed=3)
    for each, reward in zip(groups[0].episodes, (-1.0, 1.0, 0.0), strict=True):
        each.reward = reward
    groups[0].episodes[2].unscored = "the judge is silent"
    write_episodes(episodes_path(folder, 3), groups)
    of_step = {"source": "train", "first_step": 3}
    with EpisodeIndex.open(folder) as index:
        for source in (None, "train"):
            wanted = EpisodeFilter(source=source, first_step=3)
            assert [e.reward for e in index.find(wanted, order="reward")] == [-1.0, 1.0, None]
            best = index.find(wanted, order="reward", descending=True)
            assert [e.reward for e in best] == [1.0, -1.0, None]
        assert index.count(EpisodeFilter(**of_step, reward_to=0.5)) == 1
        assert index.count(EpisodeFilter(**of_step, reward_term="vowels", reward_from=2.0)) == 2


def test_bars_of_a_histogram_and_their_episodes_agree(folder):
    with EpisodeIndex.open(folder) as index:
        histogram = index.histogram(ALL, num_bins=4)
        assert (histogram.low, histogram.high) == (1.0, 2.2)
        assert histogram.counts == [6, 0, 0, 6]
        terms = index.histogram(ALL, term="consistent")
        assert (terms.low, terms.counts) == (1 / 3, [12]), "one value is one bar"
        assert index.histogram(EpisodeFilter(text="nothing")) is None
        choices = index.choices()
    assert choices.statuses == {"done": 12}
    assert choices.terms == ["consistent", "respected", "vowels", "win"]
    assert (choices.num_steps, choices.last_step, choices.problems) == (2, 2, [])


def test_choices_follow_what_other_processes_write(folder):
    with EpisodeIndex.open(folder) as index:
        assert index.choices() is index.choices()
        write_episodes(episodes_path(folder, 3), run_samples.groups(seed=3))
        index_episodes(folder, episodes_path(folder, 3))
        assert index.choices().last_step == 3
        episodes_path(folder, 3).unlink()
        index.refresh()
        assert index.choices().last_step == 2


def test_a_search_follows_what_other_processes_write(folder):
    wanted = EpisodeFilter(text="guess3")
    with EpisodeIndex.open(folder) as index:
        assert index.count(wanted) == 0
        path = episodes_path(folder, 3)
        path.write_bytes(
            gzip.compress(
                gzip.decompress(episodes_path(folder, 2).read_bytes()).replace(b"guess2", b"guess3")
            )
        )
        index_episodes(folder, path)
        assert index.count(wanted) == 6
        assert [each.member for each in index.find(wanted, limit=3)] == [0, 1, 2]
        assert sum(index.histogram(wanted, num_bins=2).counts) == 6
        assert index.count(EpisodeFilter(text="guess1")) == 6
        path.unlink()
        index.refresh()
        assert index.count(wanted) == 0


@pytest.mark.parametrize("text", ["g", "gu", "gue", "guess1"])
def test_the_beginning_of_a_word_finds_it(folder, text):
    assert len(found(folder, EpisodeFilter(text=text))) == (6 if text == "guess1" else 12)


def test_an_index_of_an_older_version_is_made_anew(folder):
    expected = found(folder)
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        connection.execute("DROP TABLE words")
        connection.execute("CREATE VIRTUAL TABLE words USING fts5(text, content='')")
        connection.execute("PRAGMA user_version = 1")
        connection.commit()
    assert found(folder) == expected
    assert len(found(folder, EpisodeFilter(text="ends here"))) == 12


def test_training_and_a_reader_make_the_same(folder, tmp_path):
    for step in (1, 2):
        index_episodes(folder, episodes_path(folder, step))
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        (number,) = connection.execute("SELECT count(*) FROM episodes").fetchone()
    assert number == 12, "a reader has nothing left to do"
    first = found(folder)
    (folder / FILE_NAME).unlink()
    assert found(folder) == first


def test_it_follows_the_files(folder):
    assert len(found(folder)) == 12
    episodes_path(folder, 2).unlink()  # as a resume does
    assert {step for step, *_ in found(folder)} == {1}
    assert found(folder, EpisodeFilter(text="guess2x1")) == []
    write_episodes(episodes_path(folder, 2), run_samples.groups(num_groups=1, seed=9))
    write_episodes(episodes_path(folder, 1), run_samples.groups(num_groups=1, seed=8))
    assert len(found(folder)) == 6
    assert found(folder, EpisodeFilter(text="guess1x1")) == []
    assert len(found(folder, EpisodeFilter(text="crane or"))) == 6


def test_evaluations_are_indexed(tmp_path):
    folder = run_samples.create(tmp_path)
    run_samples.evaluate(folder, "trained", 0.6)
    with EpisodeIndex.open(folder.path) as index:
        assert index.count(EpisodeFilter(source="eval/trained", success=True)) == 6
        assert index.choices().sources == {"eval/trained": 10}
        worst, *_, best = index.tasks("eval/trained")
    assert (worst.num_episodes, worst.success, best.success) == (1, 0.0, 1.0)
    assert worst.task.startswith("eval/") and worst.reward < best.reward
    path = file_of(folder.path, "eval/trained", None)
    assert path == folder.path / "eval" / "trained.jsonl.gz"
    with pytest.raises(RunFolderError, match="no episodes of"):
        file_of(folder.path, "eval/../../secret", None)


@pytest.mark.parametrize(
    "content", [b"", b"garbage" * 999, b"SQLite format 3\x00" + b"\xff" * 5000]
)
def test_a_damaged_index_is_made_anew(folder, content):
    expected = found(folder)
    (folder / FILE_NAME).write_bytes(content)
    index_episodes(folder, episodes_path(folder, 1))  # Training neither fails nor mends it.
    assert found(folder) == expected
    assert (folder / FILE_NAME).read_bytes()[:15] == b"SQLite format 3"


def test_a_page_that_is_damaged_later_is_noticed(folder):
    expected = found(folder)
    path = folder / FILE_NAME
    content = bytearray(path.read_bytes())
    size = 4096
    for page in range(1, len(content) // size):
        path.write_bytes(content[: page * size] + b"\xff" * size + content[(page + 1) * size :])
        assert found(folder) == expected, page


def test_tables_of_others_are_not_used(folder):
    expected = found(folder)
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        connection.execute("CREATE TRIGGER t AFTER DELETE ON files BEGIN DELETE FROM episodes; END")
        connection.execute("UPDATE episodes SET reward = 'none'")
        connection.commit()
    assert found(folder) == expected
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        connection.execute("UPDATE episodes SET reward = 'none', terms = '[]'")
        connection.commit()
    assert found(folder) == expected, "values of other types are no values"


def test_nothing_is_written_through_a_link(folder, tmp_path):
    target = tmp_path / "precious"
    target.write_bytes(b"")
    for name in (FILE_NAME, f"{FILE_NAME}-journal"):
        (folder / name).symlink_to(target)
        index_episodes(folder, episodes_path(folder, 1))
        assert len(found(folder)) == 12
        assert target.read_bytes() == b""
        (folder / name).unlink()


def test_an_index_that_others_write_does_not_stop_training_or_readers(folder, monkeypatch):
    monkeypatch.setattr("openenv_pipe.extras.viewer.episodes.index_file.READER_WAIT_S", 0.01)
    expected = found(folder)
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        index_episodes(folder, episodes_path(folder, 1))
        assert found(folder) == expected


def test_a_damaged_file_is_named_and_the_others_are_found(folder):
    path = episodes_path(folder, 1)
    path.write_bytes(zlib.compress(b'{"group": "1/0"}\n', 1, 31))
    with EpisodeIndex.open(folder) as index:
        assert {each.step for each in index.find(ALL)} == {2}
        (problem,) = index.choices().problems
    assert str(path) in problem


def test_text_of_others_is_kept_as_text(folder):
    groups = run_samples.groups(num_groups=1, size=1)
    (each,) = groups[0].episodes
    each.turns[-1].reply = "\ud800<script>\x00\x1b[31m" + "long " * 50_000 + "beyond"
    each.status, each.error = Status.ERROR, "\ud800 broke"
    write_episodes(episodes_path(folder, 3), groups)
    with EpisodeIndex.open(folder) as index:
        (entry,) = index.find(EpisodeFilter(text="script"))
        assert entry.preview.startswith("\\ud800<script>\\u0000\\u001b[31mlong")
        assert (entry.error, entry.is_scored) == ("\\ud800 broke", False)
        assert index.count(EpisodeFilter(text="beyond")) == 0, "beyond the limit"


def test_an_episode_that_is_nested_too_deep_is_a_problem(folder):
    path = episodes_path(folder, 1)
    row = json.loads(zlib.decompress(path.read_bytes(), 31).splitlines()[0])
    for depth, expected in ((60, 1), (400, 0)):
        row["first_observation"] = {"deep": json.loads("[" * depth + '"needle"' + "]" * depth)}
        path.write_bytes(zlib.compress(json.dumps(row).encode(), 1, 31))
        assert len(found(folder, EpisodeFilter(text="needle"))) == expected
    with EpisodeIndex.open(folder) as index:
        assert "nests more than 80 levels deep" in str(index.choices().problems)


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_sqlite_writes_through_no_link_beside_the_index(folder, tmp_path_factory, suffix):
    EpisodeIndex.opened(folder).close()
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    private = tmp_path_factory.mktemp("private") / "file"
    private.write_bytes(b"private" * 10_000)
    (folder / f"{FILE_NAME}{suffix}").symlink_to(private)
    assert len(found(folder)) == 12
    assert private.read_bytes() == b"private" * 10_000


def test_an_episode_of_too_many_terms_is_a_problem(folder):
    path = episodes_path(folder, 1)
    row = json.loads(zlib.decompress(path.read_bytes(), 31).splitlines()[0])
    row["reward_terms"] = {str(number): 0.0 for number in range(1001)}
    path.write_bytes(zlib.compress(json.dumps(row).encode(), 1, 31))
    with EpisodeIndex.open(folder) as index:
        assert "1,001 reward terms" in str(index.choices().problems)
