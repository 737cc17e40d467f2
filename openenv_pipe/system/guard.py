"""The guardian of one command: ends the command's whole process tree with the parent.

    python -I -S guard.py PARENT_PID GRACE_S SCRATCH COMMAND...

`process.ManagedProcess` starts it. It uses only the standard library, so that it runs some 20 ms
after the call. Its stdin is a pipe held by the parent:

    "6162=2a\\n"   the first line: pairs of bytes in hexadecimal; in the output, replace ab by *
    "2.5\\n"       end the tree: SIGTERM now, SIGKILL after 2.5 seconds
    end of file   the parent is gone, however it died: end the tree after GRACE_S

SIGTERM to the guardian also ends the tree after GRACE_S. SIGINT and SIGHUP are ignored, because the
parent decides what a Ctrl-C means. When the command ends, all processes it left behind are killed
at once, and the folder SCRATCH is removed unless SCRATCH is "". The exit code is the command's;
128 + N if signal N ended it; 127 if it cannot be started.

Python's resource trackers are killed last. They end by themselves when the processes that they
watch are gone, and remove the shared memory and semaphores that those have left.

On Linux the tree is every descendant in any session or group, because the guardian adopts orphans;
elsewhere it is the command's process group. If the guardian itself is killed, on Linux the command
dies with it, but the command's children do not.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ON_LINUX = sys.platform == "linux"

CANNOT_START = 127
PARENT_CHECK_S = 1.0  # The pipe alone is not enough: a fork of the parent may hold it open.
DRAIN_LIMIT_S = 1.0  # for the end of the output, after the end of all processes
KILL_LIMIT_S = 5.0  # A process that survives SIGKILL for this long never ends.
TRACKER_LIMIT_S = 1.0  # for resource trackers, after all others were killed
TRACKER = b"multiprocessing.resource_tracker"  # in its command line


class Tree:
    """The command and all its descendants."""

    def __init__(self, command: list[str], output: int) -> None:
        """Start the command. output: the file descriptor of its stdout and stderr."""
        libc = ctypes.CDLL(None) if ON_LINUX else None
        if libc:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.exit_code: int | None = None  # the command's, once it has ended
        guard_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            enter_tree(libc, guard_pid, output)
            exec_command(command)

    def reap(self) -> None:
        """Collect the exit codes of the command and of adopted orphans that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = code if code >= 0 else 128 - code

    def send(self, number: int, *, spare_trackers: bool = False) -> bool:
        """Send a signal to every process; False if none is left. Signal 0 only checks."""
        if ON_LINUX:
            members = descendants(os.getpid())
            for pid in members:
                if not (spare_trackers and is_tracker(pid)):
                    send_signal(os.kill, pid, number)
            return bool(members)
        return send_signal(os.killpg, self.pid, number)

    def gone_within(self, limit_s: float, number: int, *, spare_trackers: bool = False) -> bool:
        """Send a signal repeatedly until no process is left (True) or `limit_s` is over (False)."""
        deadline = time.monotonic() + limit_s
        pause_s = 0.005
        while True:
            self.reap()
            if not self.send(number, spare_trackers=spare_trackers):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    def end(self, grace_s: float) -> None:
        """Send SIGTERM once, then SIGKILL to what is left after `grace_s`. Bounded."""
        if grace_s > 0:
            self.send(signal.SIGTERM)
        if self.gone_within(grace_s, 0):
            return
        if not self.gone_within(TRACKER_LIMIT_S, signal.SIGKILL, spare_trackers=True):
            self.gone_within(KILL_LIMIT_S, signal.SIGKILL)


class Redactor:
    """Replaces texts in a stream of bytes, also where one is split between two chunks."""

    def __init__(self, replacements: Mapping[bytes, bytes]) -> None:
        self._replacements = sorted(replacements.items(), key=lambda each: -len(each[0]))
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """Return what can be written now. An end that may begin a text is held back."""
        data = self._held + chunk
        for text, replacement in self._replacements:
            data = data.replace(text, replacement)
        num_held = max((_overlap(data, text) for text, _ in self._replacements), default=0)
        written = len(data) - num_held
        self._held = data[written:]
        return data[:written]

    def end(self) -> bytes:
        """Return what was held back, after the last chunk."""
        return self._held


def _overlap(data: bytes, text: bytes) -> int:
    """Return the number of bytes at the end of `data` with which `text` begins."""
    for number in range(min(len(data), len(text) - 1), 0, -1):
        if data.endswith(text[:number]):
            return number
    return 0


class Output:
    """The command's stdout and stderr on their way to ours, without the texts to replace."""

    def __init__(self, replacements: Mapping[bytes, bytes]) -> None:
        self._redactor = Redactor(replacements)
        self._reader, self.writer = os.pipe()
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def begin(self) -> None:
        """Copy from now on; the command has its end of the pipe."""
        os.close(self.writer)
        self._thread.start()

    def end(self) -> None:
        """Wait for the rest, after the processes that wrote have ended."""
        self._thread.join(DRAIN_LIMIT_S)

    def _copy(self) -> None:
        while chunk := os.read(self._reader, 2**16):
            write_all(self._redactor.feed(chunk))
        write_all(self._redactor.end())


def write_all(data: bytes) -> None:
    """Write to stdout. What a full disk does not take is lost, and the command goes on."""
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        return


def enter_tree(libc: "ctypes.CDLL | None", guard_pid: int, output: int) -> None:
    """Give the forked child its output and default signals, and let it end with the guardian."""
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Ignored signals stay ignored across exec.
        if libc:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard_pid:  # The guardian died before the line above.
                os._exit(CANNOT_START)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    except OSError as error:
        os.write(2, f"cannot prepare the command's process: {error.strerror}\n".encode())
        os._exit(CANNOT_START)


def exec_command(command: list[str]) -> None:
    """Replace the forked child by the command. Never returns."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]!r}: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_START)


def descendants(root: int) -> list[int]:
    """List all processes below `root`, including zombies (Linux only: reads /proc)."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib is slow to import
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    # The name stands in parentheses and may itself contain parentheses.
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):  # The process ended meanwhile.
                continue
            children.setdefault(parent, []).append(int(name))
    found = list(children.get(root, ()))
    for pid in found:  # The list grows during the loop.
        found += children.get(pid, ())
    return found


def is_tracker(pid: int) -> bool:
    """Return whether the process is a resource tracker of Python's multiprocessing."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return TRACKER in file.read()
    except OSError:
        return False


def send_signal(send: Callable[[int, int], None], pid: int, number: int) -> bool:
    """Send a signal; False if the process does not exist."""
    try:
        send(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def watch_signals() -> int:
    """Make SIGCHLD and SIGTERM readable on the returned file descriptor; ignore Ctrl-C."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # The thread that started us may block some.
    return reader


def wait_for_stop(signals_fd: int, parent_pid: int, grace_s: float) -> float | None:
    """Wait for an event; return the grace in seconds if the tree is to end, else None."""
    ready, _, _ = select.select([0, signals_fd], [], [], PARENT_CHECK_S)
    if 0 in ready:
        lines = os.read(0, 64).split()
        return float(lines[0]) if lines else grace_s
    told_to_end = signals_fd in ready and signal.SIGTERM in os.read(signals_fd, 512)
    return grace_s if told_to_end or os.getppid() != parent_pid else None


def read_replacements() -> dict[bytes, bytes]:
    """Read the first line of stdin. At the end of file the parent is gone."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(128 + signal.SIGKILL)
        line += byte
    pairs = (each.split("=") for each in line.decode().split())
    return {bytes.fromhex(text): bytes.fromhex(mark) for text, mark in pairs}


def main() -> int:
    parent_pid, grace_s, scratch = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    try:
        output = Output(read_replacements())
        signals_fd = watch_signals()
        tree = Tree(sys.argv[4:], output.writer)
        output.begin()
        try:
            return wait_for_end(tree, signals_fd, parent_pid, grace_s)
        finally:
            output.end()
    finally:
        if scratch:
            import shutil  # Imported late because it is slow to import.

            shutil.rmtree(scratch, ignore_errors=True)


def wait_for_end(tree: Tree, signals_fd: int, parent_pid: int, grace_s: float) -> int:
    """Wait until the tree has ended, or end it; return the exit code."""
    while tree.exit_code is None:
        stop_grace_s = wait_for_stop(signals_fd, parent_pid, grace_s)
        tree.reap()
        if stop_grace_s is not None:
            tree.end(stop_grace_s)
            return 128 + signal.SIGKILL if tree.exit_code is None else tree.exit_code
    tree.end(grace_s=0)
    return tree.exit_code


if __name__ == "__main__":
    sys.exit(main())
