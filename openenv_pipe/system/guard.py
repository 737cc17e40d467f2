"""The guardian of one command: nothing that the command started outlives the parent.

    python -I -S guard.py PARENT_PID GRACE_S SCRATCH COMMAND...

`process.ManagedProcess` starts it; nothing imports it. It uses the standard library only, so that
it is running some 20 ms after the call. Its stdin is a pipe whose other end the parent holds:

    "2.5\\n"       end the tree: SIGTERM now, SIGKILL after 2.5 seconds
    end of file   the parent is gone, however it died: the same, with GRACE_S

SIGTERM to the guardian does the same, SIGINT and SIGHUP do nothing: a Ctrl-C is the parent's to
judge. When the command ends, what it left behind is killed at once, and the folder SCRATCH removed,
if that names one. Exit code: the command's; 128 + N if signal N ended it, 127 if it cannot be
started.

On Linux the tree is every descendant, in whatever session or group, because the guardian adopts
orphans; elsewhere it is the command's process group. The command dies with a killed guardian on
Linux; its own children then do not.
"""

import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ON_LINUX = sys.platform == "linux"

CANNOT_START = 127
PARENT_CHECK_S = 1.0  # a fork of the parent may hold the pipe open, so the pipe alone is not enough
KILL_LIMIT_S = 5.0  # a process that SIGKILL does not end in this time never ends


class Tree:
    """The command and all that it started."""

    def __init__(self, command: list[str]) -> None:
        libc = ctypes.CDLL(None) if ON_LINUX else None
        if libc:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.exit_code: int | None = None  # of the command, once it has ended
        guard_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            become(command, libc, guard_pid)

    def reap(self) -> None:
        """Collect everything that has ended: the command and adopted orphans."""
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

    def send(self, number: int) -> bool:
        """Send a signal to every member; False if there is none left. Signal 0 only looks."""
        if ON_LINUX:
            members = descendants(os.getpid())
            for pid in members:
                quietly(os.kill, pid, number)
            return bool(members)
        return quietly(os.killpg, self.pid, number)

    def gone_within(self, limit_s: float, number: int) -> bool:
        """Send a signal again and again until nothing is left, or `limit_s` is over."""
        deadline = time.monotonic() + limit_s
        pause_s = 0.005
        while True:
            self.reap()
            if not self.send(number):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    def end(self, grace_s: float) -> None:
        """SIGTERM once, then SIGKILL to what is left after `grace_s`. Bounded."""
        if grace_s > 0:
            self.send(signal.SIGTERM)
        if not self.gone_within(grace_s, 0):
            self.gone_within(KILL_LIMIT_S, signal.SIGKILL)


def become(command: list[str], libc: "ctypes.CDLL | None", guard_pid: int) -> None:
    """Turn the forked child into the command. Never returns."""
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # ignored signals would stay so across exec
        if libc:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard_pid:  # died before the line above
                return
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]!r}: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_START)


def descendants(root: int) -> list[int]:
    """All processes below `root`, those not yet reaped included (Linux: read from /proc)."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib is slow to import
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    # The command's name stands in parentheses and may itself hold some.
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):  # ended while we looked
                continue
            children.setdefault(parent, []).append(int(name))
    found = list(children.get(root, ()))
    for pid in found:  # grows while it is walked
        found += children.get(pid, ())
    return found


def quietly(send, pid: int, number: int) -> bool:
    """Send a signal; False if there is nobody to receive it."""
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
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started us may block some
    return reader


def orders(signals_fd: int, parent_pid: int, grace_s: float) -> float | None:
    """Wait for news. The grace in seconds with which to end the tree, None to keep it."""
    ready, _, _ = select.select([0, signals_fd], [], [], PARENT_CHECK_S)
    if 0 in ready:
        lines = os.read(0, 64).split()
        return float(lines[0]) if lines else grace_s
    told_to_end = signals_fd in ready and signal.SIGTERM in os.read(signals_fd, 512)
    return grace_s if told_to_end or os.getppid() != parent_pid else None


def main() -> int:
    parent_pid, grace_s, scratch = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    try:
        return guard(sys.argv[4:], parent_pid, grace_s)
    finally:
        if scratch:
            import shutil  # slow to import, and nothing waits any more

            shutil.rmtree(scratch, ignore_errors=True)


def guard(command: list[str], parent_pid: int, grace_s: float) -> int:
    """Until the command and all that it started have ended. The exit code."""
    signals_fd = watch_signals()
    tree = Tree(command)
    while tree.exit_code is None:
        order = orders(signals_fd, parent_pid, grace_s)
        tree.reap()
        if order is not None:
            tree.end(order)
            return 128 + signal.SIGKILL if tree.exit_code is None else tree.exit_code
    tree.end(grace_s=0)
    return tree.exit_code


if __name__ == "__main__":
    sys.exit(main())
