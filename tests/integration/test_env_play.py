"""`env play` with piped input: the model's view, replies, rewards, and every way to end it."""

import io
import signal
import sys
import urllib.error
import urllib.request

import pytest

from openenv_pipe.cli import main as cli
from tests.commands import REPOSITORY, Command, servers_of, wait_until


@pytest.fixture
def play(tmp_path, monkeypatch, capsys):
    """A function that runs the command in this process; it returns exit code and stdout, and
    asserts that stderr is empty."""

    def run_command(replies: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "stdin", io.StringIO(replies))
        with pytest.raises(SystemExit) as ended:
            cli.main(["env", "play", *arguments])
        shown = capsys.readouterr()
        assert shown.err == ""
        assert servers_of(tmp_path) == []
        return ended.value.code, shown.out

    return run_command


def test_a_whole_episode(play):
    code, shown = play("a\nb\nc\nd\n", "echo", "--split", "eval", "--index", "1")
    assert code == 0
    assert shown.startswith("[system]\nYou are shown a letter.")
    assert shown.count("> ") == shown.count("reward ") - 1 == 4
    assert "done after 4 turns, with reward 0." in shown


def test_of_an_experiment_every_part_of_the_reward_is_shown(play):
    reward = ["reward=ruler", "judge=openai", "judge.model=m", "judge.api_key=null"]
    clip = "reward.transforms.env=[{type: clip, low: 7, high: null}]"
    weight = "reward.terms.env.weight=0.5"
    code, shown = play("a\nb\nc\nd\n", "conf=echo", *reward, weight, clip)
    assert code == 0
    assert "  env/transformed 7\n" in shown
    assert "  ruler has no value: a judge or a verifier decides it" in shown
    assert shown.endswith("  reward 3.5\n")


def test_a_package_without_a_block_and_the_end_of_the_input(play):
    replies = "no object\n"
    code, shown = play(replies, str(REPOSITORY / "envs/echo"), "--raw", "--seed", "7")
    assert code == 0
    assert '"letter": "' in shown
    assert "there is no JSON object in the reply" in shown
    assert "stopped before the end, with reward 0 in all" in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["wordel"], "did you mean wordle"),
        (["echo", "--index", "400"], "tasks 0 to 399"),
        (["http://127.0.0.1:1", "--web"], "host=attach"),
    ],
)
def test_mistakes_exit_2(capsys, arguments, expected):
    with pytest.raises(SystemExit) as ended:
        cli.main(["env", "play", *arguments])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_the_servers_page(tmp_path):
    process = Command(tmp_path, "env", "play", "echo", "--web")
    try:
        wait_until(lambda: "\n" in process.out, "the page's address", process)
        page, _, _ = process.out.partition("\n")
        path, _, key = page.partition("?key=")
        assert path.endswith("/web") and key
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{path}/", timeout=60)
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(page, timeout=60) as answer:
            assert answer.status == 200 and "key=" not in answer.url
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    finally:
        process.kill()
    wait_until(lambda: servers_of(tmp_path) == [], "the server's end")
