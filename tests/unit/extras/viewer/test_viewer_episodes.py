"""The viewer's answers about episodes: lists, conversations, tokens, groups and tasks."""

import json
import math
import zlib
from pathlib import Path
from statistics import fmean

import pytest
import run_samples
from starlette.testclient import TestClient

from openenv_pipe.algorithms.advantages import step_advantages
from openenv_pipe.extras.viewer.web import server
from openenv_pipe.extras.viewer.web.bundle import write_bundle
from openenv_pipe.extras.viewer.web.run_store import RunStore
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.runs.checkpoints import StageStep, new_checkpoint
from openenv_pipe.runs.episodes import episodes_path, read_recorded_episodes, write_episodes
from openenv_pipe.runs.transcript import whole_transcript
from openenv_pipe.types import Judgement, Status, Usage

RUN = "/api/runs/smoke/0001"
CALL = '{"name": "look", "arguments": {}}'
HOSTILE = "<script>alert(1)</script>\x1b[31m[bold]\u202e\ud800"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two steps; in the second one, a group without signal, one with failures, and hostile text."""
    folder = run_samples.create(tmp_path_factory.mktemp("runs"))
    run_samples.train(folder, num_steps=1)
    groups = run_samples.groups(num_groups=3, size=3, seed=2)
    for group in groups:
        for each in group.episodes:
            each.reward, each.turn_rewards = float(each.member), []
    for each in groups[0].episodes:
        each.reward = 0.5
    for each in groups[1].episodes[:2]:
        each.status, each.error = Status.ERROR, "the server is gone"
    groups[2].episodes[1].turns[0].messages = [
        {"role": "tools", "content": '[{"name": "look"}]'},
        {"role": "assistant", "content": "I see", "calls": [CALL]},
        {"role": "tool", "content": "x" * 30_000},
    ]
    last = groups[2].episodes[0]
    last.turns[0].reply = HOSTILE
    last.first_observation = {"page": HOSTILE, "long": "x" * 30_000, "none": None}
    last.judgements = {"ruler": Judgement(explanation="well done")}
    last.output, last.exit_code = HOSTILE, 7
    advantages = step_advantages(groups, baseline="group", scale="none", discount=1.0)
    write_episodes(episodes_path(folder.path, 2), groups, advantages)
    run_samples.evaluate(folder, "trained", 0.6, step=2)
    return folder


def open_client(runs_dir: Path) -> TestClient:
    return TestClient(server.build_app(RunStore(runs_dir)), base_url="http://127.0.0.1")


@pytest.fixture(scope="module")
def client(folder):
    return open_client(folder.path.parents[1])


def ask(client, what: str, **query) -> dict:
    answer = client.get(f"{RUN}/{what}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_list_and_its_filters(client):
    found = ask(client, "episodes")
    assert found["total"] == len(found["episodes"]) == 6 + 9
    assert found["choices"]["sources"] == {"train": 15, "eval/trained": 10}
    assert ask(client, "episodes", status="error", first_step="2")["total"] == 2
    assert ask(client, "episodes", success="no", last_step="1", is_truncated="")["total"] < 6
    assert ask(client, "episodes", source="eval/trained", success="yes")["total"] == 6
    assert ask(client, "episodes", text="server is go")["total"] == 2
    rewards = [
        each["reward"] for each in ask(client, "episodes", order="reward", way="down")["episodes"]
    ]
    scored = [reward for reward in rewards if reward is not None]
    assert scored == sorted(scored, reverse=True)
    assert rewards[len(scored) :] == [None] * 2, "failed episodes have none, and come last"


def test_a_bar_keeps_the_episodes_that_it_counts(client):
    whole = ask(client, "episodes")["histogram"]
    width = (whole["high"] - whole["low"]) / len(whole["counts"])
    for index, size in enumerate(whole["counts"]):
        low = whole["low"] + index * width
        is_last = index == len(whole["counts"]) - 1
        bounds = {"reward_to": whole["high"]} if is_last else {"reward_below": low + width}
        kept = ask(client, "episodes", reward_from=low, is_scored="yes", **bounds)
        assert kept["total"] == size
        assert ask(client, "episodes", reward_from=low, **bounds)["histogram"] == whole


@pytest.mark.parametrize(
    "query",
    [{"first_step": "x"}, {"reward_from": "nan"}, {"order": "color"}, {"offset": "1" * 50}],
)
def test_what_is_no_filter_is_rejected(client, query):
    answer = client.get(f"{RUN}/episodes", params=query)
    assert answer.status_code == 404
    assert "expected" in answer.json()["error"]


def test_huge_numbers_are_no_error(client):
    assert ask(client, "episodes", first_step="9" * 39)["total"] == 0
    assert ask(client, "episodes", reward_from="1e999")["total"] == 0


def test_messages_are_those_that_episodes_prints(client, folder):
    entry = next(e for e in ask(client, "episodes", first_step=2)["episodes"] if e["line"] == 8)
    turn = ask(client, "episode", step=2, line=8, whole="yes")["turns"][0]
    (found,) = read_recorded_episodes(episodes_path(folder.path, 2), {8})
    printed = whole_transcript(found.episode)
    assert [each["role"] for each in turn["messages"]] == ["tools", "assistant", "tool"]
    assert "".join(f"[{m['role']}] {m['text']}\n" for m in turn["messages"]) in printed
    assert json.loads(turn["messages"][0]["text"]) == [{"name": "look"}]
    assert turn["messages"][1]["text"] == f"I see\n<tool_call>\n{CALL}\n</tool_call>"
    group = ask(client, "group", step=2, group=entry["group_id"])["members"][1]
    assert group["turns"][0]["messages"][2]["text"].endswith("(10,000 more characters)")


def test_an_episode_as_a_conversation(client, folder):
    (line,) = [
        each["line"] for each in ask(client, "episodes", text="alert", first_step=2)["episodes"]
    ]
    shown = ask(client, "episode", step=2, line=line)
    assert shown["entry"]["member"] == 0
    assert [each["member"] for each in shown["members"]] == [0, 1, 2]
    page = "<script>alert(1)</script>\\u001b[31m[bold]\\u202e\\ud800"
    assert shown["turns"][0]["reply"] == shown["first_observation"]["page"] == page
    assert shown["first_observation"]["long"].endswith("... (10,000 more characters)")
    assert "none" not in shown["first_observation"]
    assert shown["judgements"] == {"ruler": "well done"}
    assert (shown["output"], shown["exit_code"]) == (page, 7)
    assert shown["turns"][0]["advantage"] == -1.0
    assert shown["turns"][0]["steps"][0]["action"] == {"guess": "crane"}
    whole = ask(client, "episode", step=2, line=line, whole="yes")
    assert whole["first_observation"]["long"] == "x" * 30_000


@pytest.mark.parametrize(
    ("masks", "reason"),
    [
        (True, "a limit cut off all its episodes that have a reward, and trainer.loss."),
        (False, "its advantages are all zero"),
    ],
)
def test_a_group_of_episodes_that_were_cut_off_says_so_if_these_have_no_loss(
    tmp_path, masks, reason
):
    config = run_samples.config(tmp_path)
    loss = config.trainer.loss.model_copy(update={"mask_truncated": masks})
    trainer = config.trainer.model_copy(update={"loss": loss})
    folder = run_samples.create(tmp_path, config.model_copy(update={"trainer": trainer}))
    groups = run_samples.groups(num_groups=1)
    for each in groups[0].episodes:
        each.reward, each.status = float(each.member), Status.TOKEN_LIMIT
    advantages = step_advantages(groups, baseline="group", scale="none", discount=1.0)
    masked = [each.without_truncated() for each in advantages]
    write_episodes(episodes_path(folder.path, 1), groups, masked)
    found = ask(open_client(tmp_path), "episode", step=1, line=1)
    assert found["skipped"].startswith(reason)


def test_why_a_group_was_skipped(client):
    groups = {each["group_id"]: each for each in ask(client, "episodes", first_step=2)["episodes"]}
    said = [ask(client, "group", step=2, group=group)["skipped"] for group in sorted(groups)]
    assert said[0] == "all its episodes have the reward 0.5, so none is better than another"
    assert said[1] == "fewer than two of its episodes have a reward"
    assert said[2] is None
    members = ask(client, "group", step=2, group=sorted(groups)[2])["members"]
    assert [each["entry"]["advantage"] for each in members] == [-1.0, 0.0, 1.0]


def test_tokens_have_what_was_recorded(client, folder):
    (recorded,) = read_recorded_episodes(episodes_path(folder.path, 2), {9})
    tokens = ask(client, "tokens", step=2, line=9)
    turns = recorded.episode.turns
    ids = [token for turn in turns for token in [*turn.prompt_ids, *turn.completion_ids]]
    assert tokens["ids"] == ids
    assert sum(tokens["mask"]) == sum(len(turn.completion_ids) for turn in turns)
    known = [each for each in tokens["logprob"] if each is not None]
    assert known == pytest.approx([each for turn in turns for each in turn.logprobs])
    assert {each for each in tokens["advantage"] if each is not None} == {1.0}
    assert [at for at, each in enumerate(tokens["advantage"]) if each is not None] == [
        at for at, each in enumerate(tokens["mask"]) if each
    ]
    assert tokens["problem"] is None
    tokenizer = build_tokenizer()
    texts = [tokenizer.decode([each]) for each in ids]
    assert [len(each) for each in tokens["texts"]] >= [len(each) for each in texts]


def test_without_a_tokenizer_tokens_have_ids(client, folder):
    """A run of a hub's model without a checkpoint, made by nobody knows whom."""
    other = run_samples.create(folder.path.parents[1])
    run_samples.train(other, num_steps=1)
    config = other.path / "config.json"
    config.write_text(
        config.read_text()
        .replace('"type": "tiny"', '"type": "hub", "path": "a/b", "revision": null')
    )  # fmt: skip
    answer = client.get("/api/runs/smoke/0002/tokens", params={"step": 1, "line": 1})
    assert answer.json()["texts"] is None
    assert "there is no tokenizer" in answer.json()["problem"]


STRIP = {"type": "Strip", "content": "a", "start": 5, "stop": 5}
TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"decoder": STRIP}, "PanicException"),
        ({"normalizer": {"type": "Sequence", "normalizers": [TENFOLD] * 9}}, "memory allocation"),
        ({"model": {}}, "cannot be used"),
        (None, "is larger than 64 MB"),
    ],
)
def test_a_hostile_tokenizer_ends_neither_the_page_nor_the_bundle(tmp_path, change, reason):
    other = run_samples.create(tmp_path / "runs")
    run_samples.train(other, num_steps=1)
    with new_checkpoint(other.path, StageStep("grpo", 1)) as path:
        build_tokenizer().save_pretrained(path)
    file = other.checkpoints()[0] / "tokenizer.json"
    if change is None:
        with file.open("wb") as opened:
            opened.truncate(2**31)
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    store = RunStore(tmp_path / "runs")
    client = TestClient(server.build_app(store), base_url="http://127.0.0.1")
    tokens = ask(client, "tokens", step=1, line=1)
    assert tokens["texts"] is None
    assert reason in tokens["problem"]
    assert str(file) in tokens["problem"]
    write_bundle(store, tmp_path / "bundle", keys=["smoke/0001"], stamps=[], trust=False)
    assert (tmp_path / "bundle" / "index.html").exists()


def test_an_engine_of_messages_has_no_tokens(client, folder):
    groups = run_samples.groups(num_groups=1, size=1)
    for turn in groups[0].episodes[0].turns:
        turn.prompt_ids = turn.completion_ids = turn.logprobs = []
        turn.usage = Usage(num_prompt_tokens=3, num_completion_tokens=4)
    write_episodes(episodes_path(folder.path, 7), groups)
    assert "messages, not tokens" in ask(client, "tokens", step=7, line=1)["problem"]
    assert ask(client, "episode", step=7, line=1)["entry"]["num_tokens"] == 3 * 7
    episodes_path(folder.path, 7).unlink()


@pytest.mark.parametrize("what", ["episode", "tokens", "group"])
@pytest.mark.parametrize(
    "query",
    [{}, {"step": 99, "line": 1}, {"step": 2, "line": 99}, {"source": "eval/../x", "line": 1}],
)
def test_episodes_that_are_not_there(client, what, query):
    answer = client.get(f"{RUN}/{what}", params={"group": "none", **query})
    assert answer.status_code == 404
    assert answer.json()["error"]


def test_tasks_and_one_task_over_the_steps(client):
    tasks = ask(client, "tasks")
    rewards = [each["reward"] for each in tasks]
    assert len(rewards) == 3 and rewards == sorted(rewards)
    found = ask(client, "episodes", task_id="eval/0", order="step")
    (shown,) = (each["steps"] for each in tasks if each["task"] == "eval/0")
    assert shown == [
        [step, pytest.approx(fmean(e["reward"] for e in found["episodes"] if e["step"] == step))]
        for step in (1, 2)
    ]
    assert {each["step"] for each in found["episodes"]} == {1, 2}
    assert {each["task"] for each in found["episodes"]} == {"eval/0"}


def test_demonstrations_are_no_step_of_a_task(tmp_path):
    folder = run_samples.create(tmp_path)
    for step in (0, 1):
        write_episodes(episodes_path(folder.path, step), run_samples.groups(seed=step))
    app = server.build_app(RunStore(tmp_path))
    tasks = ask(TestClient(app, base_url="http://127.0.0.1"), "tasks")
    assert [[step for step, _ in each["steps"]] for each in tasks] == [[1]] * len(tasks)


def test_the_filtered_episodes_are_saved_as_lines(client):
    listed = ask(client, "episodes", first_step=2, success="no")["episodes"]
    answer = client.get(f"{RUN}/export", params={"first_step": 2, "success": "no"})
    assert answer.headers["Content-Disposition"] == 'attachment; filename="smoke_0001.jsonl"'
    saved = [json.loads(line) for line in answer.text.splitlines()]
    assert len(saved) == len(listed) > 0
    assert {(each["group"], each["member"]) for each in saved} == {
        (each["group_id"], each["member"]) for each in listed
    }
    assert client.get(f"{RUN}/export", params={"first_step": "two"}).status_code == 404


def test_a_damaged_file_is_named(client, folder):
    path = episodes_path(folder.path, 8)
    path.write_bytes(zlib.compress(b"[]\n", 1, 31))
    (problem,) = ask(client, "episodes")["choices"]["problems"]
    assert str(path) in problem
    path.unlink()
    assert ask(client, "episodes")["choices"]["problems"] == []


def test_rewards_that_are_not_finite_do_not_stop_the_page(client, folder):
    groups = run_samples.groups(num_groups=1, size=2)
    groups[0].episodes[0].reward = math.inf
    write_episodes(episodes_path(folder.path, 9), groups)
    found = ask(client, "episodes", first_step=9)
    (problem,) = found["choices"]["problems"]
    assert "inf is not a reward" in problem
    Path(episodes_path(folder.path, 9)).unlink()
