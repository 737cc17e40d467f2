"""The seccomp filter: which system calls a pure function may make, for x86-64 and 64-bit Arm.

`ALLOWED` calls work. `REJECTED` calls fail with EPERM: a library may make them, and works without
their result. Any other call kills the process with SIGSYS, as does making memory executable or
opening a file for writing. The process also cannot open a file for reading, start a process or
thread, or send or mask a signal.
"""

import ctypes
import os
from struct import pack

# name: (number on x86-64, on 64-bit Arm); None means that the machine has no such call
ALLOWED = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "futex": (202, 98),
    "clock_gettime": (228, 113),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
}
REJECTED = {
    "stat": (4, None),
    "lstat": (6, None),
    "ioctl": (16, 29),
    "access": (21, None),
    "nanosleep": (35, 101),
    "uname": (63, 160),
    "fcntl": (72, 25),
    "getcwd": (79, 17),
    "readlink": (89, None),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "sched_getaffinity": (204, 123),
    "clock_nanosleep": (230, 115),
    "newfstatat": (262, 79),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "statx": (332, 291),
    "faccessat2": (439, 439),
}
# Instructions of the BPF machine, and offsets of the fields of `struct seccomp_data` they load.
LOAD, JUMP_IF_EQUAL, JUMP_IF_SET, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, THIRD_ARGUMENT_AT = 0, 4, 32
KILL, ALLOW, REJECT = 0x80000000, 0x7FFF0000, 0x00050001  # the last one with EPERM

PROT_EXEC, OPEN_TO_WRITE = 0o4, 0o103  # O_WRONLY, O_RDWR, O_CREAT
# name: (numbers, bits of the third argument that kill the process, action for all other calls)
UNLESS_SET = {
    "mmap": ((9, 222), PROT_EXEC, ALLOW),
    "mprotect": ((10, 226), PROT_EXEC, ALLOW),
    # The compiler tries to open the file of a syntax error, and works without it.
    "openat": ((257, 56), OPEN_TO_WRITE, REJECT),
}

MACHINES = ("x86_64", "aarch64")
ARCHITECTURES = (0xC000003E, 0xC00000B7)  # AUDIT_ARCH_X86_64, AUDIT_ARCH_AARCH64
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install() -> None:
    """Install the filter for good. Raises OSError if this machine or kernel does not support it."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(f"no system call filter for {machine}, only for {', '.join(MACHINES)}")
    instructions = program(MACHINES.index(machine))
    filter_program = _Program(len(instructions) // 8, instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), f"prctl {arguments[0]} failed")


def program(machine: int) -> bytes:
    """Return the filter for `MACHINES[machine]`, as an array of `struct sock_filter`."""
    kill = _instruction(RETURN, KILL)
    steps = [
        _instruction(LOAD, ARCHITECTURE_AT),
        _instruction(JUMP_IF_EQUAL, ARCHITECTURES[machine], if_true=1) + kill,
        _instruction(LOAD, NUMBER_AT),
    ]
    for table, verdict in ((ALLOWED, ALLOW), (REJECTED, REJECT)):
        for numbers in table.values():
            if numbers[machine] is not None:
                steps.append(_if_number(numbers[machine], _instruction(RETURN, verdict)))
    for numbers, bits, verdict in UNLESS_SET.values():
        then = [_instruction(LOAD, THIRD_ARGUMENT_AT), _instruction(JUMP_IF_SET, bits, if_false=1)]
        then += [kill, _instruction(RETURN, verdict)]
        steps.append(_if_number(numbers[machine], b"".join(then)))
    return b"".join([*steps, kill])


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return pack("HBBI", code, if_true, if_false, value)


def _if_number(number: int, then: bytes) -> bytes:
    """Return code that runs `then` for the system call `number` and skips it for all others."""
    return _instruction(JUMP_IF_EQUAL, number, if_false=len(then) // 8) + then
