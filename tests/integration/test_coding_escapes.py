"""Programs that try to leave the sandbox of `coding`, against a real server."""

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from coding import policies, problems
from coding.sandbox.box import ROOTS
from test_env_servers import Session, serve

from tests.commands import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
CANARY = Path("/tmp/coding-escaped")
VIOLATION, LIMIT = "SandboxViolation", "LimitExceeded"
# Removes Python's side of the sandbox, so that only the kernel's filter is left.
DISARM = "import sys\nsys.modules['__main__'].end = lambda **answer: None\n"
LIBC = DISARM + "libc = sys.modules['system_calls'].ctypes.CDLL(None)\n"
MODULES = DISARM + "from builtins import __loader__\n"

ESCAPES = {
    "fork bomb": ("import os\nwhile True:\n    os.fork()", VIOLATION),
    "fork bomb, disarmed": (DISARM + "import os\nwhile True:\n    os.fork()", VIOLATION),
    "endless loop": ("while True:\n    pass", LIMIT),
    "loop that catches all": (
        "while True:\n    try:\n        while True:\n            pass\n"
        "    except BaseException:\n        pass",
        LIMIT,
    ),
    "waiting forever": ("import os\nos.read(0, 1)", LIMIT),
    "memory balloon": ("blocks = []\nwhile True:\n    blocks.append(bytearray(10**6))", LIMIT),
    "deep recursion": ("def dive():\n    dive()\ndive()", LIMIT),
    "deep recursion in C": (
        "import sys\nsys.setrecursionlimit(10**9)\nnest = []\nfor _ in range(10**6):\n"
        "    nest = [nest]\nrepr(nest)",
        LIMIT,
    ),
    "file write": (f"open('{CANARY}', 'w').write('x')", VIOLATION),
    "file write, disarmed": (DISARM + f"open('{CANARY}', 'w').write('x')", VIOLATION),
    "file in its own folder": ("open('canary', 'w').write('x')", VIOLATION),
    "huge file": (f"import os\nos.truncate('{CANARY}', 10**12)", VIOLATION),
    "symlink": (f"import os\nos.symlink('/etc/passwd', '{CANARY}')", VIOLATION),
    "symlink, disarmed": (DISARM + f"import os\nos.symlink('/', '{CANARY}')", VIOLATION),
    "socket": ("import socket\nsocket.create_connection(('127.0.0.1', 80))", VIOLATION),
    "tests as a module": ("import coding.problems", VIOLATION),
    "tests as a file": (f"open('{problems.__file__}').read()", VIOLATION),
    "environment of the server": (
        "import os\nopen(f'/proc/{os.getppid()}/environ').read()",
        VIOLATION,
    ),
    "memory of the server": (
        "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
        VIOLATION,
    ),
    "kill of the server": ("import os\nos.kill(os.getppid(), 9)", VIOLATION),
    "kill of everything, disarmed": (DISARM + "import os\nos.kill(-1, 9)", VIOLATION),
    "printed flood": ("while True:\n    print('x' * 1000)", LIMIT),
    "flood of the pipe": ("import os\nwhile True:\n    os.write(1, b'x' * 10**5)", LIMIT),
    "sys.exit": ("import sys\nsys.exit(0)", VIOLATION),
    "os._exit": ("import os\nos._exit(0)", VIOLATION),
    "crash on purpose": ("import os\nos.abort()", VIOLATION),
    "forged answers": (
        'import os\nos.write(1, b\'{"loaded": true}\\n{"passed": 20, "results": true}\\n\')',
        VIOLATION,
    ),
    "threads": ("import threading\nthreading.Thread(target=print).start()", VIOLATION),
    "threads, disarmed": (
        MODULES + "__loader__.load_module('_thread').start_new_thread(print, ())",
        VIOLATION,
    ),
    "masked signals, disarmed": (
        MODULES + "__loader__.load_module('_signal').signal(15, 1)",
        VIOLATION,
    ),
    "native socket": (LIBC + "libc.socket(2, 1, 0)", VIOLATION),
    "native trace of the server": (LIBC + "libc.ptrace(16, libc.getppid(), 0, 0)", VIOLATION),
    "native read of the server": (LIBC + "libc.process_vm_readv(1, 0, 0, 0, 0, 0)", VIOLATION),
    "native way out of its root": (LIBC + "libc.chroot(b'..')", VIOLATION),
    "executable memory": (LIBC + "libc.mmap(0, 4096, 7, 34, -1, 0)", VIOLATION),
    "masked signals": ("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)", VIOLATION),
    "background process": (
        "import os\nos.posix_spawn('/bin/sleep', ['sleep', '60'], {})",
        VIOLATION,
    ),
    "another program": ("import os\nos.execv('/bin/sh', ['sh'])", VIOLATION),
    "another program, disarmed": (DISARM + "import os\nos.execv('/bin/sh', ['sh'])", VIOLATION),
    "native code": ("import ctypes\nctypes.string_at(0)", VIOLATION),
    "made-up bytecode": ("(lambda: 0).__code__.replace(co_code=b'')", VIOLATION),
    "its own audit": ("import sys\nsys.addaudithook(print)", VIOLATION),
}
ESCAPES |= {
    "results equal to everything": (
        "class Equal:\n    def __eq__(self, other):\n        return True\n"
        "def {name}(*arguments):\n    return Equal()",
        VIOLATION,
    ),
    "results that are almost strings": (
        "class Text(str):\n    __eq__ = lambda self, other: True\n"
        "def {name}(*arguments):\n    return Text()",
        VIOLATION,
    ),
}


@pytest.fixture(scope="module")
def coding_port() -> Iterator[int]:
    with serve("coding.server.app") as port:
        yield port


def sandboxes() -> list[int]:
    """Return the processes that run submissions, but for those of another worker's tests."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(part.endswith("sandbox/inside") for part in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.Error):  # the process has just ended
                parents = {parent.pid for parent in process.parents()}
                if os.getpid() in parents or os.getppid() not in parents:
                    found.append(process.pid)
    return found


def secrets(problem: problems.Problem) -> list[str]:
    """Return the texts of hidden tests that occur in no visible example."""
    examples, hidden = problem.tests()
    texts = [test.arguments[0] for test in hidden]
    return [text for text in texts if len(text) > 8 and text not in repr(examples)]


@pytest.mark.parametrize("escape", ESCAPES)
def test_an_escape_earns_an_error_and_a_penalty_and_the_server_lives(coding_port, escape):
    program, error = ESCAPES[escape]
    problem = problems.problems("train")[0]

    async def scenario():
        async with Session(coding_port) as session:
            first = await session.send("reset", split="train", index=0)
            program_ = program.replace("{name}", problem.function)
            reply = await session.send("step", code=program_)
            assert (reply["observation"]["error"], reply["reward"] < 0) == (error, True), reply
            assert reply["observation"]["tests_passed"] == 0
            assert reply["done"] == (error == VIOLATION)
            assert await session.send("reset", split="train", index=0) == first
            reply = await session.send("step", code=problem.solution)
            assert (reply["reward"], reply["done"]) == (1.0, True)

    asyncio.run(scenario())
    assert not CANARY.exists() and not CANARY.is_symlink()
    # each is named by its process, and gone before it ends
    roots = [root for folder in ROOTS for root in folder.glob("coding-*-*")]
    assert not [root for root in roots if not psutil.pid_exists(int(root.name.split("-")[1]))]
    assert not sandboxes()


def test_endless_loops_keep_nobody_from_resetting(coding_port):
    """Each session's thread waits for its program; the server's event loop stays free."""
    num_ended = 0

    async def loop() -> None:
        nonlocal num_ended
        async with Session(coding_port) as session:
            await session.send("reset", index=0, attempts=1)
            reply = await session.send("step", code="while True: pass")
            num_ended += 1
            assert reply["observation"]["error"] == LIMIT

    async def scenario():
        async with Session(coding_port) as session, asyncio.TaskGroup() as loops:
            for _ in range(3):
                loops.create_task(loop())
            while not sandboxes():
                await asyncio.sleep(0.01)
            # resets take milliseconds, while a program may use a second of the processor
            for index in range(5):
                await session.send("reset", index=index)
            assert num_ended == 0

    asyncio.run(scenario())
    assert not sandboxes()


def test_a_program_whose_client_left_ends_at_its_limit(coding_port):
    async def scenario():
        async with Session(coding_port) as session:
            await session.send("reset", index=0)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await session.send("step", code="while True: pass")

    asyncio.run(scenario())
    wait_until(lambda: not sandboxes(), "the program's end")


def test_programs_end_with_their_server():
    with serve("coding.server.app") as port:

        async def scenario():
            async with Session(port) as session:
                await session.send("reset", index=0)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await session.send("step", code="import os\nos.read(0, 1)")

        asyncio.run(scenario())
    # the server, which could have killed it, has ended
    wait_until(lambda: not sandboxes(), "the program's end")


async def test_an_episode_over_the_wire(coding_port):
    """The server gives feedback after each attempt, rewards improvements, and shows nothing
    hidden."""
    problem = problems.problems("train")[0]

    async with Session(coding_port) as session:
        seen = [await session.send("reset", split="train", index=0, attempts=4)]
        assert seen[0]["observation"]["statement"] == problem.statement
        for code in ("not python", f"def {problem.function}(text): return ''", "x = 1"):
            seen.append(await session.send("step", code=code))
            assert not seen[-1]["done"]
        assert [reply["reward"] for reply in seen] == [None, 0.0, seen[2]["reward"], 0.0]
        assert 0.2 <= seen[2]["reward"] < 0.5
        seen.append(await session.send("step", code=f"So:\n```python\n{problem.solution}```"))
        assert seen[-1]["observation"]["status"] == "solved" and seen[-1]["done"]
        assert sum(reply["reward"] for reply in seen[1:]) == pytest.approx(1.0)
        late = await session.send("step", code=problem.solution)
        assert (late["reward"], late["done"]) == (0.0, True)
        assert (await session.send("state"))["step_count"] == 4
        assert not any(secret in repr(seen) for secret in secrets(problem))


async def test_hidden_arguments_cannot_be_smuggled_out(coding_port):
    problem = problems.problems("train")[0]
    raised = f"def {problem.function}(*all): raise ValueError(repr(all))"
    named = f"def {problem.function}(*all): raise type(repr(all), (Exception,), {{}})()"

    last = "seen = []\ndef {0}(text):\n    seen.append(text)\n    if len(seen) == 22:\n        {1}"
    imported = last.format(problem.function, "__import__('socket.' + repr(seen))")
    said = last.format(
        problem.function, "import sys; sys.modules['conversation'].end(limit=repr(seen))"
    )

    async with Session(coding_port) as session:
        await session.send("reset", split="train", index=0, attempts=8)
        for code in (raised, named, said, imported):
            reply = await session.send("step", code=code)
            assert reply["observation"]["error"]
            assert not any(secret in repr(reply) for secret in secrets(problem))


async def test_sessions_at_once_stay_apart(coding_port):
    async def one_session(index: int) -> None:
        async with Session(coding_port) as session:
            reply = await session.send("reset", split="eval", index=index)
            code = policies.reference([reply["observation"]], random.Random(0))
            assert (await session.send("step", code=code))["reward"] == 1.0

    await asyncio.gather(*(one_session(index) for index in range(12)))


async def test_bad_reset_arguments_are_rejected(coding_port):
    async with Session(coding_port) as session:
        early = await session.send("step", code="")
        assert (early["reward"], early["done"]) == (0.0, True)
        for reset in ({"split": "x"}, {"index": 10**6}, {"attempts": 0}, {"seed": "x"}):
            error = await session.send("reset", **reset)
            assert error["code"] == "EXECUTION_ERROR"
            assert next(iter(reset)) in error["message"]
