"""Drop all rights that the process does not need, in an order in which each step is still allowed.

Resource limits, the change of user (for root) and the seccomp filter must succeed. Namespaces and
the empty root directory are used where the kernel allows them. No step can be undone.
"""

import ctypes
import os
import resource
import sys
from collections.abc import Callable

import system_calls

NOBODY = 65534
PR_SET_PDEATHSIG, SIGKILL = 1, 9
CLONE_NEWUSER, OTHER_NAMESPACES = 0x10000000, 0x4C000000  # uts, ipc, network
CAPABILITY_VERSION_3 = 0x20080522


def confine(cpu_s: int, memory_mb: int, root: str) -> list[str]:
    """Apply all layers and return the names of those in force. Raises OSError.

    root: the path of an empty folder, which is removed.
    """
    if sys.platform != "linux":
        raise OSError(f"no sandbox for {sys.platform}, only for Linux")
    is_root = os.geteuid() == 0
    layers = ["resource limits", "no new privileges", "system call filter"]
    libc = ctypes.CDLL(None, use_errno=True)
    _limit_resources(cpu_s, memory_mb)
    os.nice(10)
    optional: dict[str, Callable[[], bool]] = {
        "namespaces": lambda: _leave_namespaces(libc, is_root),
        "empty root": lambda: _enter_an_empty_root(root),
    }
    layers += [name for name, enter in optional.items() if enter()]
    if is_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        layers.append("user nobody")
    _drop_capabilities(libc)
    # The process must die with the server. A change of user clears this setting, so it comes later.
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    system_calls.install()
    return sorted(layers)


def _limit_resources(cpu_s: int, memory_mb: int) -> None:
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_mb * 2**20,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 16,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, limit in limits.items():
        _, most = resource.getrlimit(kind)
        lower = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (lower, lower))


def _leave_namespaces(libc: ctypes.CDLL, is_root: bool) -> bool:
    """Cut off network and shared memory; without root, this needs a user namespace."""
    return libc.unshare(OTHER_NAMESPACES | (0 if is_root else CLONE_NEWUSER)) == 0


def _enter_an_empty_root(path: str) -> bool:
    """Enter a removed folder, which has no files and in which none can be made."""
    try:
        os.chdir(path)
        os.rmdir(path)  # noqa: PTH106 - importing pathlib takes longer than all of this
        os.chroot(".")
    except OSError:
        return False
    return True


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if libc.capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset failed")
