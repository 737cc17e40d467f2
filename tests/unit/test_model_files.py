"""A model's folder is read within limits: its tokenizer, its configurations, and headers."""

import json
import os
import struct

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat import limited_program, rendering
from openenv_pipe.models.load import load_chat, load_policy, load_tokenizer, select_device
from openenv_pipe.models.memory_estimate import read_folder_shape
from openenv_pipe.models.model_files import check_model_folder, read_header, token_texts
from openenv_pipe.models.tiny import build_tokenizer

REPEATED = (
    "{{% set n = namespace(x={start}) %}}"
    "{{% for i in range(99) %}}{{% set n.x = {change} %}}{{% endfor %}}"
)


@pytest.fixture
def folder(tmp_path):
    """A model's folder without weights."""
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return tmp_path


def model(folder):
    return compose(["conf=smoke", "model=hub", f"model.path={folder}"]).config.model


def change(folder, **values):
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_the_texts_are_those_of_the_library(folder):
    content = (folder / "tokenizer.json").read_bytes()
    tokenizer = build_tokenizer()
    expected = {number: tokenizer.decode([number]) for number in tokenizer.get_vocab().values()}
    assert token_texts(folder / "tokenizer.json", content) == expected


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 5}}, "PanicException"),
        (
            {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": ""}},
            "Regex search error",
        ),
        ({"model": {}}, "cannot be used"),
    ],
)
def test_a_tokenizer_that_ends_its_process_is_named(folder, values, reason):
    change(folder, **values)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_tokenizer(model(folder))
    assert str(folder / "tokenizer.json") in str(caught.value)


def test_the_time_of_a_tokenizer_is_bounded(folder):
    grown = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    change(folder, normalizer={"type": "Sequence", "normalizers": [grown] * 15})
    content = (folder / "tokenizer.json").read_bytes()
    with pytest.raises(ConfigError, match=r"more than 1 s of CPU time|memory allocation"):
        token_texts(folder / "tokenizer.json", content, cpu_s=1)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("{{ 9 ** 9999999999 }}", "CPU time|memory"),
        (REPEATED.format(start="7", change="n.x * n.x"), "CPU time|memory"),
        ("{{ 'a' * 9999999999 }}", "more than 512 MB"),
        (REPEATED.format(start="'a'", change="n.x ~ n.x"), "more than 512 MB"),
        ("{% if tools %}{{ [0] * 9999999999 }}{% endif %}", "more than 512 MB"),
        ("{% generation %}{% endgeneration %}{{ '%9999999999d' % 1 }}", "more than 512 MB"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "cannot render"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot render"),
    ],
    ids=["power", "squares", "text", "doubled", "with tools", "format", "nested", "recursive"],
)
def test_a_template_that_nothing_would_interrupt_is_named(folder, expression, reason, monkeypatch):
    monkeypatch.setattr(rendering, "TRIAL_CPU_S", 1)
    file = folder / "chat_template.jinja"
    file.write_text(expression + file.read_text())
    with pytest.raises(ConfigError, match=reason) as caught:
        load_chat(model(folder))
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["default", "tool_use"])
def test_each_of_several_templates_is_tried(folder, name):
    own = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    templates = {"default": own, "tool_use": own, name: "{{ 'a' * 9999999999 }}" + own}
    config["chat_template"] = [{"name": key, "template": text} for key, text in templates.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="more than 512 MB"):
        load_chat(model(folder))


def test_a_template_may_have_half_a_surrogate_pair(folder):
    own = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{# \ud800 #}" + own
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_chat(model(folder)).first_ids([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_files_of_the_model_are_files_of_a_size(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match=f"{name} is not a file"):
        check_model_folder(folder)
    (folder / name).unlink()
    with (folder / name).open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(ConfigError, match=f"{name} has 2,048 MB; expected at most 64 MB"):
        load_policy(model(folder), seed=0, device=select_device("cpu"))


def test_values_of_a_model_are_counted(folder):
    (folder / "config.json").write_text("[" + "0," * 4_000_000 + "0]")
    with pytest.raises(ConfigError, match="has more than 4,000,000 values"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 2**64 - 1),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 400) + b"[" * 400,
        struct.pack("<Q", 10) + b'{"a": 1}  ',
        b"",
    ],
)
def test_a_header_of_weights_is_bounded(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors|'int' object") as caught:
        read_folder_shape(model(folder), folder)
    assert str(folder) in str(caught.value)


def test_the_header_of_weights_is_read(folder):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert read_header(file) == (8 + len(header), json.loads(header))


def test_an_interrupt_of_the_process_group_is_no_fault_of_a_tokenizer(tmp_path, monkeypatch):
    """Ctrl-C, and a notebook's stop button, are sent to a whole group of processes."""
    program = tmp_path / "program.py"
    program.write_text("import os; print(os.getpgrp())")
    monkeypatch.setattr(limited_program, "PROGRAM", program)
    group = int(limited_program.output_of("tokenizer", b"", cpu_s=5, memory_mb=100))
    assert group != os.getpgrp()


def test_a_device_that_there_is_not_is_rejected():
    with pytest.raises(ConfigError, match="device='gpu': expected auto, cpu or cuda"):
        select_device("gpu")


def test_a_folder_without_a_tokenizer_says_so(folder):
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json nor .* tokenizer\.save_pretra"):
        load_tokenizer(model(folder))
