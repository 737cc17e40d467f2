"""`profile` on a real training: its table, its file, and that it leaves nothing else."""

import json
import signal

import jsonschema

from tests.commands import SMALL, Command, ended_by, run, servers_of

# The part of https://www.speedscope.app/file-format-schema.json that sampled profiles use.
INDEX = {"type": "integer", "minimum": 0}
SCHEMA = {
    "type": "object",
    "required": ["$schema", "profiles", "shared"],
    "properties": {
        "$schema": {"const": "https://www.speedscope.app/file-format-schema.json"},
        "activeProfileIndex": INDEX,
        "exporter": {"type": "string"},
        "name": {"type": "string"},
        "shared": {
            "type": "object",
            "required": ["frames"],
            "properties": {
                "frames": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {
                            "name": {"type": "string"},
                            "file": {"type": "string"},
                            "line": {"type": "integer"},
                        },
                    },
                }
            },
        },
        "profiles": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": [
                    *("type", "name", "unit", "startValue", "endValue", "samples", "weights"),
                ],
                "properties": {
                    "type": {"const": "sampled"},
                    "name": {"type": "string"},
                    "unit": {"const": "seconds"},
                    "startValue": {"type": "number"},
                    "endValue": {"type": "number"},
                    "samples": {"type": "array", "items": {"type": "array", "items": INDEX}},
                    "weights": {"type": "array", "items": {"type": "number", "minimum": 0}},
                },
            },
        },
    },
}


def test_a_training_is_profiled_and_leaves_only_the_file(tmp_path):
    code, out, err = run(
        tmp_path, "profile", "conf=smoke", "trainer.steps=4", "--output", "flames.json", *SMALL
    )
    assert code == 0, err
    assert [path.name for path in tmp_path.iterdir()] == ["flames.json"]
    assert out.startswith("3 steps after the first, ")
    rows = {line.split()[0] for line in out.splitlines() if line}
    assert {"sampling", "update", "checkpoint"} <= rows
    assert "trainer.checkpoint.every (now 1)" in out
    file = json.loads((tmp_path / "flames.json").read_text())
    jsonschema.validate(file, SCHEMA)
    names = [frame["name"] for frame in file["shared"]["frames"]]
    assert {"sampling", "update", "Learner.update", "Lane.run_wave"} <= set(names)
    for each in file["profiles"]:
        assert len(each["samples"]) == len(each["weights"])
        assert all(index < len(names) for sample in each["samples"] for index in sample)
    spans = [each["endValue"] - each["startValue"] for each in file["profiles"]]
    assert max(spans) - min(spans) < 1e-6 * max(spans)  # all threads over the same time


def test_an_interrupted_profile_leaves_nothing(tmp_path):
    command = Command(tmp_path, "profile", "conf=smoke", "trainer.steps=1000", *SMALL)
    code = ended_by(signal.SIGINT, command, lambda: "grpo 1/1000" in command.err, "the first step")
    assert code == 130, command.err
    assert list(tmp_path.iterdir()) == []
    assert servers_of(tmp_path) == []


def test_what_cannot_be_profiled_is_refused(tmp_path):
    for words, expected in {
        ("conf=smoke", "trainer.steps=1"): "set trainer.steps=4",
        ("conf=smoke", "--output", "none/flames.json"): "there is no folder",
        ("conf=smoke", "engine=scripted", "engine.policy=a.b:c"): "cannot train",
    }.items():
        code, out, err = run(tmp_path, "profile", *words)
        assert (code, out) == (2, ""), err
        assert expected in err
        assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
