"""Conversations become episodes: what is imitated, what is left out, and what TRL makes of both."""

import json
from types import SimpleNamespace

import pytest
from fakes import run_config, tiny_policy, trained_tensors
from test_rerender import stock_tokenizer

from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.commands.findings import Result
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.sft.command import compose_sft
from openenv_pipe.extras.sft.conversations import read_conversations, try_conversations, turns_of
from openenv_pipe.extras.sft.rows import BadRowError, conversation_of, read_rows
from openenv_pipe.extras.sft.schema import ConversationsConfig
from openenv_pipe.learner.supervised import WarmStart
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.chat.messages import paired
from openenv_pipe.models.tiny import CHAT_TEMPLATE, build_tokenizer
from openenv_pipe.pipeline.requirements import REQUIREMENTS, check_requirements
from openenv_pipe.runs.transcript import branch_notes

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
QUESTION = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}
ROWS = [
    [QUESTION, ANSWER],
    [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "content": "Four"},
    ],
    [QUESTION, ANSWER, {"role": "user", "content": "and 3+3?"}, {**ANSWER, "content": "six"}],
    [QUESTION, ANSWER, {"role": "user", "content": "sure?"}],
]
TRL_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message.content }}{% if message.role == 'assistant' %}<|end|>{% endif %}",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}",
)


def written(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return ConversationsConfig(type="conversations", path=str(path), split="train")


async def groups_of(source, chat, notes=None, max_tokens=120):
    return await read_conversations(
        source,
        SimpleNamespace(
            config=run_config(
                {
                    "env.max_episode_tokens": max_tokens,
                    "trainer.warm_start.source.policy": "module:function",
                    "trainer.warm_start.steps": 3,
                    "trainer.warm_start.episodes_per_step": 32,
                }
            ),
            rollout=SimpleNamespace(chat=chat),
            notify=(notes if notes is not None else []).append,
        ),
    )


def samples_of(groups):
    return [
        sample
        for group in groups
        for episode in group.episodes
        for sample in episode_samples(group.id, episode, [1.0] * len(episode.turns))
    ]


async def test_the_replies_of_a_conversation_are_imitated_in_the_models_own_format():
    chat = ChatFormat(build_tokenizer())
    row = {"messages": [QUESTION, CALLING, RESULT, ANSWER], "tools": [ADD]}
    turns = turns_of(conversation_of(row), chat, 500)
    prompts = [chat.tokenizer.decode(turn.prompt_ids) for turn in turns]
    assert prompts == ["<|system|>add(a)\n<|user|>2+2?<|assistant|>", "<|user|>3<|assistant|>"]
    assert [turn.reply for turn in turns] == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "4",
    ]
    for turn in turns:
        assert chat.tokenizer.decode(turn.completion_ids) == f"{turn.reply}<|end|>"
        assert turn.completion_ids[-1] == chat.tokenizer.eos_token_id
        assert turn.logprobs == [0.0] * len(turn.completion_ids)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3_5_think", ["\n</think>\n\n4<|im_end|>", "why\n</think>\n\n4<|im_end|>"]),
        (
            "gptoss",
            [
                "<|channel|>final<|message|>4<|return|>",
                "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
                "<|channel|>final<|message|>4<|return|>",
            ],
        ),
    ],
)
def test_a_plain_reply_is_imitated_as_the_stock_template_writes_it(name, expected):
    chat = ChatFormat(stock_tokenizer(name), "rerender")
    thoughtful = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\n4"}
    row = {"messages": [QUESTION, ANSWER, QUESTION, thoughtful]}
    turns = turns_of(conversation_of(row), chat, 2000)
    assert [chat.tokenizer.decode(turn.completion_ids) for turn in turns] == expected


def test_a_thought_without_a_place_in_the_template_is_rejected():
    tokenizer = stock_tokenizer("qwen3")
    tokenizer.chat_template = "{% set enable_thinking = false %}" + tokenizer.chat_template
    row = {"messages": [QUESTION, {**ANSWER, "reasoning_content": "why"}]}
    with pytest.raises(BadRowError, match="no place for the calls or thoughts of"):
        turns_of(conversation_of(row), ChatFormat(tokenizer, "rerender"), 2000)


# TRL uses names that transformers will drop.
@pytest.mark.filterwarnings("ignore::FutureWarning")
async def test_loss_and_gradients_are_those_of_trls_sft_trainer(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = [{"messages": row} for row in ROWS]
    source = written(tmp_path / "rows.jsonl", rows)
    policy = tiny_policy()
    groups = await groups_of(source, policy.chat)
    # Packed rows of at most 40 tokens, and all four conversations in one step.
    config = run_config({"trainer.warm_start.episodes_per_step": len(rows)}).trainer.warm_start
    ours = WarmStart(policy, config, tokens_per_batch=40, seed=0)
    gradients = []
    ours.optimizer.step = lambda: gradients.extend(
        parameter.grad.clone() for parameter in trained_tensors(policy)
    )
    loss = ours.step(samples_of(groups))["loss/supervised"]

    theirs = tiny_policy()
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TRL_TEMPLATE
    trainer = trl.SFTTrainer(
        model=theirs.model.train(),
        args=trl.SFTConfig(
            output_dir=str(tmp_path / "trl"),
            assistant_only_loss=True,
            per_device_train_batch_size=len(rows),
            use_cpu=True,
            bf16=False,
            report_to=[],
        ),
        train_dataset=datasets.load_dataset("json", data_files=source.path, split="train"),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    their_loss = trainer.compute_loss(trainer.model, batch)
    their_loss.backward()
    assert loss == pytest.approx(their_loss.item(), abs=1e-5)
    assert loss > 1.0
    for one, other in zip(gradients, trained_tensors(theirs), strict=True):
        assert (one - other.grad).abs().max() < 1e-5
    assert max(each.abs().max() for each in gradients) > 1e-3


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": [QUESTION]}, "no message of the assistant"),
        ({"text": "hello"}, "no list `messages`; it has text"),
        ({"messages": [{"role": "robot", "content": ""}]}, "the role 'robot'"),
        ({"messages": [QUESTION, {"role": "assistant", "content": 4}]}, "the content 4"),
        ({"messages": [ANSWER]}, "answers no message"),
        (
            {"messages": [QUESTION, {**RESULT}]},
            "tool_call_id='c1', which is not the id of an unanswered call",
        ),
        (
            {"messages": [QUESTION, {**CALLING, "tool_calls": [{**CALL, "id": None}]}]},
            "calls add without an id",
        ),
        ({"messages": [QUESTION, ANSWER], "tools": "[1]"}, "its tools are"),
        ({"messages": [QUESTION, ANSWER], "tools": [{"function": {}}]}, "functions with names"),
        ({"messages": [QUESTION, {**CALLING, "tool_calls": 5}]}, "the tool_calls 5; expected a"),
        ({"messages": [QUESTION, {**RESULT, "tool_call_id": [1]}]}, r"tool_call_id=\[1\], which"),
        ({"messages": [QUESTION, CALLING, RESULT, RESULT]}, "message 4 has tool_call_id='c1', wh"),
        ({"messages": [QUESTION, {**CALLING, "tool_calls": [CALL, CALL]}]}, "calls with one id"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0}]}, "nothing to imitate"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 2}]}, "weight=2; expected 1, or 0 for a rep"),
        ({"messages": [QUESTION, {**ANSWER, "weight": [0]}]}, r"weight=\[0\]; expected 1, or 0"),
        ({"messages": [QUESTION, {**ANSWER, "train": False}]}, "train=False; expected True, or we"),
        ({"messages": [QUESTION, {**ANSWER, "masked": True}]}, "masked=True; expected False, or w"),
        (
            {"messages": [QUESTION, {**ANSWER, "function_call": CALL["function"]}]},
            "message 2 has function_call=.*; write it as tool_calls, each with an id",
        ),
        ({"messages": [QUESTION, {**ANSWER, "refusal": "No."}]}, "='No.'; write it as content"),
        ({"messages": [{**QUESTION, "images": ["a.png"]}, ANSWER]}, "images=.*; send text only"),
        ({"messages": [QUESTION, ANSWER], "functions": [{}]}, "it has functions=.*as tools"),
        (
            {"messages": [QUESTION, {**ANSWER, "thinking": ["t"]}]},
            r"thinking \['t'\]; expected tex",
        ),
        (
            {"messages": [QUESTION, {**ANSWER, "reasoning": "a", "thinking": "b"}]},
            "several thoughts, reasoning and thinking; keep one",
        ),
        (
            {"messages": [QUESTION, {**ANSWER, "reasoning_details": [{"text": "t"}]}]},
            "reasoning_details; write the thought as text in reasoning_content",
        ),
    ],
)
def test_a_row_that_cannot_be_used_says_why(row, why):
    with pytest.raises(BadRowError, match=why):
        conversation_of(row)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_is_read_by_each_of_its_names(key):
    others = {"id": "m1", "name": "bot", "weight": 1, "train": True, "refusal": None}
    row = {"messages": [QUESTION, {**ANSWER, **others, key: "t"}]}
    assert conversation_of(row).messages[1] == {**ANSWER, "reasoning_content": "t"}


def test_parts_of_a_text_are_joined_as_those_of_a_programs_message():
    requests = pytest.importorskip("openenv_pipe.extras.agents.http.chat_completions")
    parts = [{"type": "text", "text": each} for each in ("one", "two")]
    question, answer = conversation_of(
        {"messages": [{**QUESTION, "content": parts}, {**ANSWER, "content": parts}]}
    ).messages
    assert question["content"] == answer["content"] == requests.text_of(parts) == "one\ntwo"


async def test_a_reply_of_weight_0_is_shown_and_not_imitated(tmp_path):
    first, answer, second, last = ROWS[2]
    source = written(
        tmp_path / "rows.jsonl", [{"messages": [first, {**answer, "weight": 0}, second, last]}]
    )
    chat, notes = tiny_policy().chat, []
    groups = await groups_of(source, chat, notes)
    assert notes[0].startswith("imitating 1 of 1 conversations, 1 replies in all")
    (sample,) = samples_of(groups)
    assert chat.tokenizer.decode(sample.token_ids) == (
        "<|user|>2+2?<|assistant|>4<|end|><|user|>and 3+3?<|assistant|>six<|end|>"
    )
    trained = [
        each for each, chosen in zip(sample.token_ids, sample.loss_mask, strict=True) if chosen
    ]
    assert chat.tokenizer.decode(trained) == "six<|end|>"
    assert branch_notes(groups[0].episodes[0]) == ["is context, and not trained", ""]


def test_results_follow_in_the_order_of_the_calls_that_they_answer():
    calls = [{**CALL, "id": each} for each in "abc"]
    results = [{**RESULT, "tool_call_id": each, "content": each} for each in "cab"]
    row = {"messages": [QUESTION, {**CALLING, "tool_calls": calls}, *results, ANSWER]}
    shown = [each["content"] for each in conversation_of(row).messages]
    assert shown == ["2+2?", "", *"abc", "4"]
    row["messages"][2:5] = results[:1]  # of the last call alone
    _, made, result, _ = paired(conversation_of(row).messages)
    assert result["tool_call_id"] == made["tool_calls"][2]["id"]


def test_a_reply_that_contains_the_end_of_a_turn_is_rejected():
    row = {"messages": [QUESTION, {"role": "assistant", "content": "4<|end|><|user|>"}]}
    with pytest.raises(BadRowError, match="the token that ends a turn"):
        turns_of(conversation_of(row), ChatFormat(build_tokenizer()), 500)


async def test_bad_rows_are_left_out_and_named_by_line(tmp_path):
    rows = [*({"messages": row} for row in ROWS[:2]), {}, {"messages": [QUESTION]}]
    rows += [{"messages": [QUESTION, {"role": "assistant", "content": 200 * "x"}]}] * 5
    source, notes = written(tmp_path / "rows.jsonl", rows), []
    groups = await groups_of(source, tiny_policy().chat, notes)
    assert [group.task.id for group in groups] == ["data/0", "data/1"]
    (note,) = notes
    read = "imitating 2 of 9 conversations, 2 replies in all, each 48 times; 7 left out"
    assert note.startswith(f"{read}\n")
    assert f"{source.path}, line 3: it has no list `messages`" in note
    assert "line 5: longer than env.max_episode_tokens=120 tokens" in note
    assert note.endswith("and 2 more")
    written(tmp_path / "rows.jsonl", [{"messages": row} for row in ROWS[:3]])
    await groups_of(source, tiny_policy().chat, notes)
    assert notes[-1] == "imitating 3 of 3 conversations, 4 replies in all, each 32 times"


def test_rows_of_a_parquet_file_are_those_of_json_lines(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = str(tmp_path / "data.parquet")
    calls = [{**CALL, "function": {"name": "add", "arguments": {key: 1}}} for key in "ab"]
    rows = [*ROWS, *([QUESTION, {**CALLING, "tool_calls": [call]}] for call in calls)]
    datasets.Dataset.from_list([{"messages": row} for row in rows]).to_parquet(path)
    source = ConversationsConfig(type="conversations", path=path, split="train")
    found = list(read_rows(source))
    read = [conversation_of(row).messages for _, row in found]
    assert read == [conversation_of({"messages": row}).messages for row in rows]
    assert found[0][0] == f"{path}, row 1"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("{}\n", "no conversation that can be used"),
        ("{}\nno json\n", "line 2 is not JSON"),
        (None, "there is no file rows.jsonl in"),
    ],
)
async def test_data_that_cannot_be_used_is_an_error_with_its_key(content, error, tmp_path):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    source = ConversationsConfig(type="conversations", path=str(path), split="train")
    with pytest.raises(ConfigError, match=error) as caught:
        await groups_of(source, tiny_policy().chat)
    assert "trainer.warm_start.source.path=" in str(caught.value)


def configured(path, *overrides, type="conversations"):
    return compose(
        [
            *("conf=client", f"trainer/warm_start/source={type}", "trainer.warm_start.steps=2"),
            *(f"trainer.warm_start.source.path={path}", *overrides),
        ]
    ).config


def test_data_to_imitate_is_read_before_a_run_has_a_folder(tmp_path, monkeypatch):
    """A run that goes on from a checkpoint has read it; one without a warm start needs none."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "rows.jsonl", [{"messages": ROWS[0]}, {}])
    assert REQUIREMENTS["warm start"](configured("rows.jsonl")) == (
        "1 of 2 conversations of rows.jsonl can be read"
    )
    for missing in (configured("row.jsonl"), configured("gone", type="episodes")):
        with pytest.raises(ConfigError, match=r"trainer\.warm_start\.source\.path='(row|gone)"):
            check_requirements(missing)
        check_requirements(missing, begins=False)
    check_requirements(configured("row.jsonl", "trainer.warm_start.steps=0"))
    (tmp_path / "gone").mkdir()
    with pytest.raises(ConfigError, match="gone has no episodes, files such as"):
        check_requirements(configured("gone", type="episodes"))


def test_check_measures_the_replies_to_imitate_against_those_that_grpo_may_write(tmp_path):
    lengths = (10, 20, 30, 90)  # a token is a character, and one ends the reply
    rows = [{"messages": [QUESTION, {**ANSWER, "content": length * "x"}]} for length in lengths]
    path = tmp_path / "rows.jsonl"
    written(path, [*rows, {}])
    limits = ("env.max_reply_tokens=30", "env.max_episode_tokens=200")
    left_out, long = try_conversations(configured(path, *limits))
    assert (left_out.result, long.result) == (Result.WARN, Result.WARN)
    assert "1 of 5 conversations are left out\n" in left_out.text
    assert "2 of 4 replies that the warm start imitates (50%)" in long.text
    assert "env.max_reply_tokens=30 tokens, up to 91" in long.text
    *_, fits = try_conversations(configured(path, "env.max_reply_tokens=91"))
    assert (fits.result, fits.text) == (Result.OK, "4 replies of at most 91 tokens")
    *_, alone = try_conversations(configured(path, *limits, "trainer.steps=0"))
    assert alone.result is Result.OK


def test_sft_takes_the_steps_of_its_passes_over_the_data(tmp_path):
    bad = [{}] * 9
    source = written(tmp_path / "rows, 'all'.jsonl", [*({"messages": row} for row in ROWS), *bad])
    given = ["model=tiny", "trainer.warm_start.episodes_per_step=3"]
    config = compose_sft(source.path, given, passes=2).config
    assert (config.trainer.steps, config.trainer.warm_start.steps) == (0, 3)
    assert config.trainer.warm_start.source == source
    assert not config.host.has_environment
    warm_start = compose_sft(source.path, ["model=tiny"], passes=1).config.trainer.warm_start
    assert (warm_start.steps, warm_start.episodes_per_step) == (1, len(ROWS))
    assert warm_start.optimizer.lr_warmup_steps == 0, "the only step has the full rate"
    config = compose_sft(source.path, ["conf=echo", "trainer.warm_start.steps=7"], passes=1).config
    assert (config.name, config.trainer.warm_start.steps) == ("echo", 7)
