"""`agent=program` with `agent/sandbox=docker`: real containers, and a whole run with them."""

import contextlib
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeHost, rollout_context, run_config

from openenv_pipe.errors import HostError
from openenv_pipe.extras.agents.programs.player import serving_programs
from openenv_pipe.extras.containers.docker.daemon import owned_containers
from openenv_pipe.extras.containers.schema import DockerSandboxConfig
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.types import Status
from tests.commands import Command, run, wait_until
from tests.docker_daemon import BASE_IMAGE
from tests.integration.test_program_train import PROGRAM
from tests.programs import RepliesEngine, agent_config, play_episodes, two_steps

pytestmark = pytest.mark.docker

CHAT = ChatFormat(build_tokenizer())
PATIENT_S = 240.0  # how long a program may work that is not to meet this limit
SANDBOX = {
    "type": "docker",
    "image": BASE_IMAGE,
    "mounts": {},
    "build_timeout_s": 60.0,
    "mem_limit_mb": 128,
    "cpus": 1.0,
    "pids_limit": 64,
    "tmp_mb": 8,
    "read_only": True,
}


@pytest.fixture(autouse=True)
def nothing_is_left(docker_client, monkeypatch):
    """Assert that no container and no folder of sockets is left."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path must be short
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield
        assert shared_folders() == []
    assert owned_containers(docker_client) == []


def shared_folders():
    return list(Path(tempfile.gettempdir()).glob("openenv-pipe-*"))


@contextlib.asynccontextmanager
async def sandboxed(script, tmp_path, *replies, sandbox=None, **agent):
    """Yield a rollout context whose episodes are played by a script in a container."""
    settings = {**SANDBOX, **(sandbox or {})}
    agent = {"timeout_s": PATIENT_S, **agent}
    config = agent_config(script, sandbox=settings, **agent)
    assert isinstance(config.sandbox, DockerSandboxConfig)
    engine = RepliesEngine(CHAT, *(replies or ("yes",)))
    context = rollout_context(
        run_config({"env.max_episode_tokens": 400}), FakeHost(two_steps), chat=CHAT, engine=engine
    )
    async with serving_programs(context.loop, config, tmp_path, level="tokens") as programs:
        yield replace(context, agents=programs)


async def play_script(script, tmp_path, *replies, **settings):
    async with sandboxed(script, tmp_path, *replies, **settings) as context:
        (episode,) = await play_episodes(context)
    assert list((tmp_path / "programs").iterdir()) == []
    return episode


LOOK = """
import socket
def tried(action):
    try:
        return action()
    except OSError as error:
        return type(error).__name__, error.strerror
ask([user("a")])
print(step(text="one")["observation"], [name for _, name in socket.if_nameindex()])
# Docker's bridge, which is this machine, and a distant host.
for address in ("172.17.0.1", "192.0.2.1"):
    print(tried(lambda: socket.create_connection((address, 80), 3)))
print(post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": []}, "sk-other")[0])
print(tried(lambda: open("/file", "w")), tried(lambda: open(sys.argv[1], "a")))
print(tried(lambda: open("/run/openenv-pipe/task/prompt.txt", "a")))
print(tried(lambda: os.unlink("/run/openenv-pipe/gateway/socket")))
print(os.getcwd(), open("notes/a.txt").read(), open(sys.argv[1]).read(), sys.argv[2])
open("notes/a.txt", "w").write("changed")
print(os.environ["HOME"], os.environ["MOOD"], "OURS" in os.environ)
status = open("/proc/self/status").read()
print([line for line in status.splitlines() if line.startswith(("CapEff", "NoNewPrivs"))])
"""


async def test_a_program_reaches_the_model_its_session_and_nothing_else(
    tmp_path, docker_client, monkeypatch
):
    monkeypatch.setenv("OURS", "stays here")
    (tmp_path / "book").write_text("a book")
    before = agent_config(LOOK).command
    episode = await play_script(
        LOOK,
        tmp_path,
        sandbox={"mounts": {"/data/book": str(tmp_path / "book")}},
        command=[*before, "/data/book", "{prompt}"],
        variables={"MOOD": "merry"},
        files={"notes/a.txt": "for {model}"},
    )
    assert (episode.status, episode.error) == (Status.ANSWERED, None), episode.output
    prompt = episode.turns[0].steps[0]
    assert prompt.action == {"text": "one"}
    assert episode.output.splitlines() == [
        "{'text': 'seen 1'} ['lo']",
        "('OSError', 'Network is unreachable')",
        "('OSError', 'Network is unreachable')",
        "401",
        "('OSError', 'Read-only file system') ('OSError', 'Read-only file system')",
        "('OSError', 'Read-only file system')",
        "('OSError', 'Read-only file system')",
        "/home/openenv-pipe for policy a book seen 0",
        "/home/openenv-pipe merry False",
        "['CapEff:\\t0000000000000000', 'NoNewPrivs:\\t1']",
    ]


HANG = """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"], start_new_session=True)
ask([user("a")])
print("hangs")
time.sleep(600)
"""
FLOOD = "ask([user('a')])\nwhile True: print('x' * 10_000)"


@pytest.mark.parametrize(
    ("script", "status", "said", "settings"),
    [
        ("sys.exit('I give up')", Status.PROGRAM_FAILED, "I give up", {}),
        ("held = bytearray(2**29)", Status.PROGRAM_KILLED, "sandbox.mem_limit_mb=128", {}),
        ("", Status.PROGRAM_FAILED, "no-such-agent", {"command": ["no-such-agent"]}),
        (HANG, Status.TIME_LIMIT, "hangs", {"timeout_s": 3.0}),
        (FLOOD, Status.OUTPUT_LIMIT, "bytes left out", {}),
    ],
    ids=["fails", "memory", "not_there", "hangs", "floods"],
)
async def test_a_program_that_goes_wrong_ends_with_its_container(
    tmp_path, script, status, said, settings
):
    episode = await play_script(script, tmp_path, **settings)
    assert episode.status is status, (episode.error, episode.output)
    assert said in episode.output


async def test_a_container_that_docker_rejects_ends_the_run_with_dockers_words(tmp_path):
    gone = {"mounts": {"/data": str(tmp_path / "gone")}}
    with pytest.raises(HostError, match=r"agent\.sandbox\.image=.*gone"):
        await play_script("", tmp_path, sandbox=gone)


async def test_an_image_without_python_is_told(docker_client, tmp_path):
    """A container of which nothing can be run, without a registry: FROM scratch."""
    docker_client.api.import_image_from_data(bytes(10_240), "openenv-pipe-tests", tag="empty")
    try:
        sandbox = {"image": "openenv-pipe-tests:empty"}
        episode = await play_script("", tmp_path, sandbox=sandbox)
    finally:
        docker_client.images.remove("openenv-pipe-tests:empty")
    assert episode.status is Status.PROGRAM_FAILED
    assert "python3" in episode.output


def arguments(program):
    """Return the arguments of a small run with a program in containers."""
    return (
        *(
            "conf=echo",
            "agent=program",
            "agent/sandbox=docker",
            f"agent.sandbox.image={BASE_IMAGE}",
        ),
        *("agent.command=['{python}','-S',/agent.py]", "device=cpu", "num_threads=1"),
        f"agent.sandbox.mounts={{/agent.py: '{program}'}}",
        *("env.max_reply_tokens=6", "host.sessions_per_server=4", "trainer.steps=2"),
        *("trainer.tasks_per_step=1", "trainer.group_size=2", "trainer.warm_start.steps=0"),
        *("eval.num_tasks=1", "eval.baselines=false"),
    )


def test_programs_in_containers_are_trained(docker_client, tmp_path):
    """Also those whose calls at once have to be waited for, as for processes."""
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    code, _, err = run(tmp_path, "train", *arguments(program))
    assert code == 0, err
    folder = tmp_path / "runs" / "echo" / "0001"
    facts = RunFolder.open(folder).record.facts
    assert facts["program_image"]["name"] == BASE_IMAGE
    assert set(facts["program"]) == {"agent.py"}
    records = [each for each in read_metrics(folder / "metrics.jsonl") if each["step"]]
    assert len(records) == 2
    assert all(record["mismatch/max"] < 1e-4 for record in records)
    for group in read_episodes(episodes_path(folder, 2)):
        for episode in group.episodes:
            assert (episode.status, episode.output) == (Status.DONE, "done\n"), episode.error
            assert episode.parents == [
                *(None, None, None, None, None, 2, None, None, 5, None, None, 8)
            ]


def test_nothing_outlives_a_killed_run(docker_client, tmp_path):
    program = tmp_path / "agent.py"
    program.write_text("import time; time.sleep(600)")
    process = Command(tmp_path, "train", *arguments(program))
    try:
        wait_until(lambda: owned_containers(docker_client), "a container", process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finally:
        process.kill()
    wait_until(lambda: owned_containers(docker_client) == [], "the container's end")
    wait_until(lambda: shared_folders() == [], "the end of the folder")
