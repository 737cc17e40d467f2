"""`profile` on a real training: its table, and that it leaves nothing."""

import signal

from tests.commands import SMALL, Command, ended_by, run, servers_of


def test_a_training_is_profiled_and_leaves_nothing(tmp_path):
    code, out, err = run(tmp_path, "profile", "conf=smoke", "trainer.steps=4", *SMALL)
    assert code == 0, err
    assert list(tmp_path.iterdir()) == []
    assert out.startswith("3 steps after the first, ")
    rows = {line.split()[0] for line in out.splitlines() if line}
    assert {"sampling", "update", "checkpoint"} <= rows
    assert "trainer.checkpoint.every (now 1)" in out


def test_an_interrupted_profile_leaves_nothing(tmp_path):
    command = Command(tmp_path, "profile", "conf=smoke", "trainer.steps=1000", *SMALL)
    code = ended_by(signal.SIGINT, command, lambda: "grpo 1/4" in command.err, "the first step")
    assert code == 130, command.err
    assert list(tmp_path.iterdir()) == []
    assert servers_of(tmp_path) == []


def test_what_cannot_be_profiled_is_rejected(tmp_path):
    for words, expected in {
        ("conf=smoke", "trainer.steps=1"): "set trainer.steps=4",
        ("conf=smoke", "engine=scripted", "engine.policy=a.b:c"): "cannot train",
    }.items():
        code, out, err = run(tmp_path, "profile", *words)
        assert (code, out) == (2, ""), err
        assert expected in err
        assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
