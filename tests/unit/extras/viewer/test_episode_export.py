"""`episodes export`: the tools that the data sets are for read them back."""

import json
from importlib.util import find_spec
from typing import Any, Literal

import pytest
import run_samples
from pydantic import BaseModel, ConfigDict, Field

from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.viewer.episodes.export import export_episodes
from openenv_pipe.extras.viewer.episodes.listing import Selection, find_episodes
from openenv_pipe.extras.viewer.episodes.query import TRAIN, EpisodeFilter
from openenv_pipe.models.chat.messages import with_tools
from openenv_pipe.runs.episodes import episodes_path, read_episodes, write_episodes
from openenv_pipe.types import IMAGE_IDS, Group, Step, Turn
from tests.fakes import all_episodes, made_up_episode, made_up_turn

HOSTILE = "<script>alert(1)</script> \x1b[31m \ud800\u202e "
SYSTEM = "You guess a word."


def wordle_turn(reply, marks, unusable=None, shown=""):
    step = Step(action={"guess": reply}, observation={"marks": marks})
    steps = [] if unusable else [step]
    messages = [{"role": "user", "content": shown}]
    return made_up_turn(
        [1, 2], [3, 4, 5], reply=reply, steps=steps, unusable=unusable, messages=messages
    )


@pytest.fixture
def run(tmp_path):
    """A run with one group: a win in two guesses, and a loss with an unusable reply."""
    folder = run_samples.create(tmp_path)
    win = [wordle_turn("crane", "..g.y"), wordle_turn("slate", "ggggg", shown="--+-?")]
    loss = [
        wordle_turn("???", "", unusable="no word"),
        wordle_turn(HOSTILE, "yyyyy", shown="!!!!!"),
    ]
    won, lost = made_up_episode(1.0, turns=win), made_up_episode(0.0, member=1, turns=loss)
    for episode, success in ((won, True), (lost, False)):
        episode.success, episode.reward_terms = success, {"win": float(success)}
        episode.first_observation = {"marks": "", "message": "Guess"}
    group = Group(id="1/0", task=won.task, episodes=[won, lost])
    write_episodes(episodes_path(folder.path, 1), [group])
    return folder


def run_shown(tmp_path, messages):
    """A run with one episode: the model is shown these messages, and replies "go"."""
    folder = run_samples.create(tmp_path)
    turn = made_up_turn([1], [2], reply="go", messages=messages)
    episode = made_up_episode(0.5, turns=[turn])
    group = Group(id="1/0", task=episode.task, episodes=[episode])
    write_episodes(episodes_path(folder.path, 1), [group])
    return folder


def exported(run, form, path, **limits):
    selection = Selection(wanted=EpisodeFilter(source=TRAIN, **limits), first=None)
    return export_episodes(run, find_episodes(run, selection), form, path)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_trl_takes_the_conversations_for_supervised_training(run, tmp_path):
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl.data_utils")
    path = tmp_path / "wins.jsonl"
    assert exported(run, "trl", path, success=True) == 1
    data = datasets.load_dataset("json", data_files=str(path), cache_dir=str(tmp_path))["train"]
    assert trl.is_conversational(data[0])
    assert data[0]["messages"] == [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "crane"},
        {"role": "user", "content": "--+-?"},
        {"role": "assistant", "content": "slate"},
    ]


BEGIN = {"role": "user", "content": "begin"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


@pytest.mark.parametrize(
    ("told", "expected", "tools"),
    [
        (with_tools([BEGIN], TOOLS), [BEGIN], TOOLS),
        *(([{"role": "tools", "content": text}], None, None) for text in ("not JSON", "{}")),
        ([{"role": "system", "content": SYSTEM}, BEGIN], None, None),
    ],
    ids=["tools", "of a client, with the role of tools", "the same, as JSON", "as they are"],
)
def test_messages_are_as_recorded_and_tools_are_a_column_for_the_chat_template(
    tmp_path, told, expected, tools
):
    exported(run_shown(tmp_path, told), "trl", tmp_path / "all.jsonl")
    (row,) = lines_of(tmp_path / "all.jsonl")
    assert row["messages"] == [*(expected or told), {"role": "assistant", "content": "go"}]
    assert tools is None or json.loads(row["tools"]) == tools


def test_parquet_and_json_lines_have_everything_with_tokens(run, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert exported(run, "parquet", tmp_path / "all.parquet") == 2
    assert exported(run, "jsonl", tmp_path / "all.jsonl") == 2
    rows = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    won, lost = lines_of(tmp_path / "all.jsonl")
    for row, line in zip(rows, (won, lost), strict=True):
        messages = [{k: v for k, v in each.items() if v is not None} for each in row["messages"]]
        assert {**row, "messages": messages} == line
    assert won["token_ids"] == [1, 2, 3, 4, 5] * 2
    assert won["loss_mask"] == [0, 0, 1, 1, 1] * 2
    assert won["logprobs"] == [0.0, 0.0, -1.0, -1.0, -1.0] * 2
    assert (won["success"], won["reward"]) == (True, 1.0)
    assert json.loads(won["reward_terms"]) == {"win": 1.0}
    assert (won["run"], won["step"], won["group"]) == ("smoke/0001", 1, "1/0")


CALL = '{"name": "look", "arguments": {"at": 3}}'
CALLED = [
    {"role": "assistant", "content": "I look.", "calls": [CALL]},
    {"role": "tool", "content": "a door", "name": "look", "call": 0},
]


def test_parquet_has_the_calls_of_messages(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    exported(run_shown(tmp_path, CALLED), "parquet", tmp_path / "all.parquet")
    (row,) = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    asked, answered, _ = row["messages"]
    assert (asked["content"], json.loads(asked["calls"])) == ("I look.", [CALL])
    assert (answered["name"], answered["call"]) == ("look", "0")


def test_parquet_rejects_messages_with_keys_that_it_has_no_column_for(tmp_path):
    pytest.importorskip("pyarrow.parquet")
    folder = run_shown(tmp_path, [{"role": "user", "content": "?", "mood": "good"}])
    with pytest.raises(RunFolderError, match=r"keys mood, .*; use --format jsonl"):
        exported(folder, "parquet", tmp_path / "all.parquet")
    assert not (tmp_path / "all.parquet").exists()


def test_conversations_have_the_calls_of_messages_in_their_text(tmp_path):
    folder = run_shown(tmp_path, CALLED)
    exported(folder, "trl", tmp_path / "all.jsonl")
    exported(folder, "verifiers", tmp_path / "verifiers")
    exported(folder, "atif", tmp_path / "atif")
    (row,) = lines_of(tmp_path / "all.jsonl")
    (episode,) = lines_of(tmp_path / "verifiers" / "traces.jsonl")
    (file,) = (tmp_path / "atif").iterdir()
    asked = [
        row["messages"][0]["content"],
        episode["traces"][0]["nodes"][0]["message"]["content"],
        json.loads(file.read_text())["steps"][0]["message"],
    ]
    assert asked == [f"I look.\n<tool_call>\n{CALL}\n</tool_call>"] * 3


def test_an_image_that_no_observation_has_is_damage(run, tmp_path):
    episode = made_up_episode(1.0, turns=[made_up_turn([IMAGE_IDS], [3])])
    path = episodes_path(run.path, 1)
    write_episodes(path, [Group(id="1/0", task=episode.task, episodes=[episode])])
    with pytest.raises(RunFolderError, match="an episode of smoke/0001 is damaged: 1 images"):
        exported(run, "jsonl", tmp_path / "all.jsonl")


def test_hostile_text_is_data_and_can_be_stored(run, tmp_path):
    exported(run, "jsonl", tmp_path / "all.jsonl")
    text = (tmp_path / "all.jsonl").read_text()
    assert text.isascii()
    reply = lines_of(tmp_path / "all.jsonl")[1]["messages"][-1]["content"]
    assert reply == HOSTILE.replace("\ud800", "?")


def test_verifiers_lines_have_a_trace_of_messages_with_tokens(run, tmp_path):
    assert exported(run, "verifiers", tmp_path / "verifiers") == 2
    won, lost = lines_of(tmp_path / "verifiers" / "traces.jsonl")
    (trace,) = won["traces"]
    assert [each["message"]["role"] for each in trace["nodes"]] == ["user", "assistant"] * 2
    assert [each["parent"] for each in trace["nodes"]] == [None, 0, 1, 2]
    assert [each["token_ids"] for each in trace["nodes"]] == [[1, 2], [3, 4, 5]] * 2
    assert [each["mask"] for each in trace["nodes"]] == [[False] * 2, [True] * 3] * 2
    assert [each["node"] for each in trace["calls"]] == [1, 3]
    assert trace["calls"][1]["usage"] == {"prompt_tokens": 7, "completion_tokens": 3}
    assert trace["rewards"] == {"reward": {"score": 1.0}}
    assert trace["metrics"] == {"success": 1.0, "win": 1.0}
    assert (won["env"]["id"], won["group"]["id"], won["run"]["id"]) == (
        *("wordle", "1/0"),
        "smoke/0001",
    )
    assert won["run"]["work"] == {"type": "train", "step": 1, "policy": {"start": 0, "end": 0}}
    assert (won["ok"], lost["ok"], lost["errors"]) == (True, True, [])


def test_verifiers_reads_the_episodes(run, tmp_path):
    if find_spec("verifiers") is None:
        # It requires other versions than this project's packages, so CI does not install it.
        pytest.skip("verifiers is absent; it needs an environment of its own")
    from verifiers.v1.configs.agent import WireAgentConfig
    from verifiers.v1.state import State
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import Trace
    from verifiers.v1.utils.trace_store import read_episodes as read_with_verifiers

    exported(run, "verifiers", tmp_path / "verifiers")
    trace_type = Trace[WireTaskData, State, WireAgentConfig]
    won, lost = read_with_verifiers(tmp_path / "verifiers", trace_type)
    assert (won.ok, won.num_turns, won.run.work.step) == (True, 2, 1)
    (branch,) = won.traces[0].branches
    assert branch.token_ids == [1, 2, 3, 4, 5] * 2
    assert branch.sampled_mask == [False, False, True, True, True] * 2
    assert branch.logprobs == [0.0, 0.0, -1.0, -1.0, -1.0] * 2
    assert [each.content for each in won.traces[0].assistant_messages] == ["crane", "slate"]
    assert (won.traces[0].reward, lost.traces[0].reward) == (1.0, 0.0)
    assert won.traces[0].task.data.id == won.task.key
    assert (won.num_input_tokens, won.num_output_tokens) == (4, 6)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _ToolCall(_Part):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class _Result(_Part):
    source_call_id: str | None = None
    content: str | None = None


class _Observation(_Part):
    results: list[_Result]


class _Metrics(_Part):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class _AtifStep(_Part):
    step_id: int = Field(ge=1)
    source: Literal["system", "user", "agent"]
    message: str
    tool_calls: list[_ToolCall] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None


class _Agent(_Part):
    name: str
    version: str
    model_name: str | None = None


class _FinalMetrics(_Part):
    total_prompt_tokens: int
    total_completion_tokens: int
    total_steps: int


class _Trajectory(_Part):
    """The parts of Harbor's ATIF 1.4 that are written, as its RFC 0001 describes them."""

    schema_version: Literal["ATIF-v1.4"]
    session_id: str
    agent: _Agent
    steps: list[_AtifStep] = Field(min_length=1)
    final_metrics: _FinalMetrics
    extra: dict[str, Any]


def test_atif_files_follow_the_format(run, tmp_path):
    assert exported(run, "atif", tmp_path / "atif") == 2
    files = sorted((tmp_path / "atif").iterdir())
    won, lost = (_Trajectory.model_validate_json(file.read_text()) for file in files)
    assert [step.step_id for step in won.steps] == [1, 2, 3, 4]
    assert [step.source for step in won.steps] == ["user", "agent"] * 2
    for step in (*won.steps, *lost.steps):
        if step.source != "agent":
            assert (step.tool_calls, step.metrics) == (None, None)
    (call,) = won.steps[1].tool_calls
    assert (call.function_name, call.arguments) == ("step", {"guess": "crane"})
    (result,) = won.steps[1].observation.results
    assert result.source_call_id == call.tool_call_id
    assert json.loads(result.content) == {"marks": "..g.y"}
    assert won.steps[1].metrics.completion_token_ids == [3, 4, 5]
    assert [won.steps[index].metrics.prompt_tokens for index in (1, 3)] == [2, 7]
    assert won.final_metrics.total_prompt_tokens == 2 + 7
    assert won.final_metrics.total_completion_tokens == 6
    assert won.extra["reward"] == 1.0


def test_an_example_with_the_words_of_a_reply_has_none_of_its_tokens(tmp_path):
    example = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "go"}]
    folder = run_shown(tmp_path, [*example, BEGIN])
    exported(folder, "verifiers", tmp_path / "verifiers")
    (row,) = lines_of(tmp_path / "verifiers" / "traces.jsonl")
    nodes = row["traces"][0]["nodes"]
    assert [each["sampled"] for each in nodes] == [False, False, False, True]
    assert [each.get("token_ids") for each in nodes] == [None, None, [1], [2]]


def test_nothing_is_overwritten(run, tmp_path):
    exported(run, "jsonl", tmp_path / "all.jsonl")
    with pytest.raises(RunFolderError, match="exists already"):
        exported(run, "jsonl", tmp_path / "all.jsonl")


def test_the_sample_run_is_exported_whole(tmp_path):
    folder = run_samples.create(tmp_path)
    run_samples.train(folder, num_steps=2)
    assert exported(folder, "jsonl", tmp_path / "all.jsonl") == 12
    episodes = all_episodes(read_episodes(episodes_path(folder.path, 1)))
    turns: list[Turn] = [turn for episode in episodes for turn in episode.turns]
    expected = sum(turn.num_completion_tokens for turn in turns)
    rows = [row for row in lines_of(tmp_path / "all.jsonl") if row["step"] == 1]
    assert sum(sum(row["loss_mask"]) for row in rows) == expected
