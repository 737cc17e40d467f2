"""Try an untrusted tokenizer or chat template in a process of its own, within limits.

Either may never end, and cannot be interrupted, or may end the process by running out of memory.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

from openenv_pipe.system.untrusted_text import visible

PROGRAM = Path(__file__).with_name("try_untrusted.py")
BUSY = 20  # times the CPU time may pass on a machine that is busy with other things
VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
MAX_REASON_LENGTH = 200


class LimitedProgramError(Exception):
    """The process has failed or has reached a limit, for the reason in the message."""


def output_of(
    kind: Literal["tokenizer", "template"], content: bytes, *, cpu_s: int, memory_mb: int
) -> bytes:
    """Return what the program writes to stdout for a content. Raises LimitedProgramError."""
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    try:
        # One thread, whose CPU time is the process's.
        done = subprocess.run(
            [sys.executable, "-I", str(PROGRAM), kind, str(cpu_s), str(memory_mb)],
            input=content,
            capture_output=True,
            timeout=cpu_s * BUSY,
            process_group=0,  # Ctrl-C is for this process alone.
            env={**variables, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LimitedProgramError(f"it was not read within {cpu_s * BUSY} s") from None
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise LimitedProgramError(f"reading it takes more than {cpu_s} s of CPU time")
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reasons = [line for line in lines if not line.startswith("note: ")]
        reason = reasons[-1] if reasons else f"exit code {done.returncode}"
        raise LimitedProgramError(visible(reason)[:MAX_REASON_LENGTH])
    return done.stdout
