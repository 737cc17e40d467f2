"""Episode files are exact, deterministic, fast, and readable without this package."""

import gzip
import json
import math
import os
import re
import struct
import time
import tracemalloc
import zlib
from random import Random

import pytest
import run_samples

from openenv_pipe.algorithms.advantages import GroupAdvantages
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.extras.viewer.episodes.index import EpisodeIndex
from openenv_pipe.extras.viewer.episodes.query import EpisodeFilter
from openenv_pipe.runs.episodes import (
    episodes_path,
    last_episodes_path,
    read_episodes,
    read_rows,
    write_episodes,
)
from openenv_pipe.system.budgets import MAX_TURNS
from openenv_pipe.types import Status, Step

pytestmark = pytest.mark.slow


@pytest.fixture
def path(tmp_path):
    (tmp_path / "episodes").mkdir()
    return episodes_path(tmp_path, 12)


def _without_durations(groups):
    for group in groups:
        for episode in group.episodes:
            episode.duration_s = 0.0
    return groups


def test_groups_come_back_exactly(path):
    groups = run_samples.groups()
    failed = groups[0].episodes[1]
    failed.status, failed.error, failed.turns = Status.ERROR, "closed", []
    groups[1].episodes[0].turns[0].steps *= 2
    groups[1].episodes[0].turns[0].unusable = "no five letters"
    lone = {"text": "a lone \ud800, as JSON may hold"}
    groups[1].episodes[1].turns[0].steps = [Step(action=lone, observation=lone)]
    write_episodes(path, groups)
    assert read_episodes(path) == _without_durations(groups)


@pytest.mark.parametrize(
    "logprobs",
    [
        [],
        [-0.1],
        [-0.5, -math.inf],
        [1e300, 5e-324],
        [struct.unpack("f", struct.pack("f", 0.1))[0]],
    ],
)
def test_logprobs_of_any_size_come_back_exactly(path, logprobs):
    (group,) = run_samples.groups(1, 1)
    group.episodes[0].turns[0].logprobs = logprobs
    write_episodes(path, [group])
    assert read_episodes(path)[0].episodes[0].turns[0].logprobs == logprobs


def test_equal_episodes_give_equal_bytes_whenever_they_were_played(path):
    write_episodes(path, run_samples.groups())
    before = path.read_bytes()
    os.utime(path, (0, 0))
    write_episodes(path, _without_durations(run_samples.groups()))
    assert path.read_bytes() == before


def test_one_json_line_an_episode_with_advantages_where_it_was_trained_on(path):
    groups = run_samples.groups(2, 3)
    by_member = {0: [0.5, -1.0], 2: [1.0, 0.25]}
    compared = [groups[0].episodes[member] for member in by_member]
    advantages = GroupAdvantages(group=groups[0], compared=compared, by_member=by_member)
    write_episodes(path, groups, [advantages])
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        rows = [json.loads(line) for line in file]
    trained = [by_member[0], None, by_member[2]]
    assert [row["advantages"] for row in rows] == [*trained, None, None, None]
    assert rows == list(read_rows(path))
    turn = groups[0].episodes[0].turns[0]
    assert rows[0]["turns"][0]["completion_ids"] == turn.completion_ids
    assert read_episodes(path) == _without_durations(groups)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"x" + data, lambda _: b""]
)
def test_a_damaged_file_is_a_user_error(path, damage):
    write_episodes(path, run_samples.groups())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RunFolderError, match="step_000012"):
        read_episodes(path)


@pytest.mark.parametrize("number", [10**100, 2**53, -1, 1.5, True, "1", None])
def test_token_ids_are_numbers_of_tokens(path, number):
    (group,) = run_samples.groups(1, 1)
    group.episodes[0].turns[0].prompt_ids = [1, number]
    write_episodes(path, [group])
    with pytest.raises(RunFolderError, match=r"damaged episode.*a token id"):
        read_episodes(path)


@pytest.mark.parametrize(
    "message",
    [{"x": 1}, "hi", {"role": "user", "content": 1}, {"role": "user", "content": "", "calls": 5}],
)
def test_messages_have_a_role_and_a_text(path, message):
    (group,) = run_samples.groups(1, 1)
    group.episodes[0].turns[0].messages = [message]
    write_episodes(path, [group])
    with pytest.raises(RunFolderError, match="damaged episode"):
        read_episodes(path)


def test_the_last_file_is_found_and_none_without_any(path, tmp_path):
    assert last_episodes_path(tmp_path) is None
    for step in (2, 12, 7):
        write_episodes(episodes_path(tmp_path, step), [])
    assert last_episodes_path(tmp_path) == path
    assert read_episodes(path) == []


def test_a_step_of_256_episodes_is_quick_to_write(path):
    groups = run_samples.groups(32, 8, num_turns=6)
    random = Random(0)
    for group in groups:
        for episode in group.episodes:
            episode.turns = [run_samples.turn(random, num_tokens=20) for _ in range(6)]
    took_s = []
    for _ in range(3):
        started_s = time.process_time()  # processor time, which does not depend on other processes
        write_episodes(path, groups)
        took_s.append(time.process_time() - started_s)
    assert min(took_s) < 0.25, "some 30 ms, with room for a slow machine"


@pytest.mark.parametrize(
    ("piece", "times", "message"),
    [
        (b"\0" * 2**20, 250, "has a line of more than 32 MB"),
        (b"[" + b"0," * (3 * 2**20), 1, "has more than 2,000,000 values"),
        (b'{"a":"' + b"x" * 2000 + b'"}\n', 40_000, "unpacks to more than 200 times its size"),
        (b"\n" * 2**20, 4, "has nothing in line 1"),
        (b"{}\n" * 2**10, 100, "has more than 100,000 lines"),
    ],
)
def test_what_a_small_file_unpacks_to_is_bounded(path, piece, times, message):
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    path.write_bytes(b"".join(packer.compress(piece) for _ in range(times)) + packer.flush())
    tracemalloc.start()
    try:
        with pytest.raises(RunFolderError, match=message) as caught:
            for _ in read_rows(path):
                pass
        assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_what_follows_the_end_of_a_packed_file_is_not_lost_in_silence(path):
    write_episodes(path, run_samples.groups())
    path.write_bytes(path.read_bytes() + path.read_bytes())
    with pytest.raises(RunFolderError, match="something follows its end"):
        read_episodes(path)


def test_a_file_without_a_last_line_end_is_read(path):
    path.write_bytes(zlib.compress(b'{"a":1}\n{"a":2}', 1, 31))
    assert [row["a"] for row in read_rows(path)] == [1, 2]


def test_the_length_of_a_line_is_bounded(path):
    """Of one that is not packed well, so that its ratio says nothing."""
    path.write_bytes(zlib.compress(Random(0).randbytes(33 * 2**20).replace(b"\n", b" "), 1, 31))
    with pytest.raises(RunFolderError, match="has a line of more than 32 MB"):
        list(read_rows(path))


def test_the_number_of_turns_is_bounded(path):
    groups = run_samples.groups()
    write_episodes(path, groups)
    first, *others = gzip.decompress(path.read_bytes()).splitlines()
    row = json.loads(first)
    row["turns"] = [row["turns"][0]] * (MAX_TURNS + 1)
    path.write_bytes(gzip.compress(b"\n".join([json.dumps(row).encode(), *others])))
    with pytest.raises(RunFolderError, match=r"line 1 has 10,001 turns, more than 10,000"):
        read_episodes(path)
    with pytest.raises(ConfigError, match=r"max_turns"):
        compose(["conf=echo", f"env.max_turns={MAX_TURNS + 1}"])


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_an_episode_with_a_reward_that_is_not_finite_is_damaged(path, tmp_path, value):
    write_episodes(path, run_samples.groups())
    text = gzip.decompress(path.read_bytes())
    changed = re.sub(rb'"reward": ?[-0-9.e]+', b'"reward":' + value.encode(), text, count=1)
    assert changed != text
    path.write_bytes(gzip.compress(changed))
    with EpisodeIndex.open(tmp_path) as index:
        assert index.find(EpisodeFilter(), limit=-1) == []  # the file is left out as damaged
