"""Ask Linux for permission to use AMX, the matrix registers of newer x86 processors.

vLLM's attention in bfloat16 uses them wherever the processor has them. A process that uses them
without this permission is ended by SIGILL. The permission holds for all threads of the process that
asks; programs that it starts have to ask again.
"""

import ctypes
import platform
import sys

SYS_ARCH_PRCTL = 158  # of x86-64
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILE_DATA = 18


def request_amx() -> None:
    """Ask for permission. Without AMX, or on another system, nothing happens."""
    if sys.platform == "linux" and platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA)
