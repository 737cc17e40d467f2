"""What this process sets for itself: for libraries, for Python's collector and for malloc.

Torch and transformers make a million objects that stay. During the imports, the collector would
look through them again and again, which takes a third of the imports' time.

By default glibc returns large blocks to the system at once and maps new, zeroed pages for the next
ones. This costs a tenth of a small model's step, and more memory in the end, because blocks of
changing sizes leave gaps. Other C libraries are left as they are. A call of the Python API gives
the memory back when it ends, because the notebook that made the call goes on.
"""

import ctypes
import gc
import os
import sys
import warnings


def set_library_defaults() -> None:
    """Set what libraries read when they are imported, unless the user has set it."""
    # torch's idle threads must sleep, not spin: the environment servers need those cores. Spinning
    # made runs up to 20 times slower on a busy machine. Read once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # In a notebook without ipywidgets, which nothing here needs.
    warnings.filterwarnings("ignore", "IProgress not found")


WHILE_IMPORTING = (100_000, 50, 50)  # objects; multiples of the threshold before it
_usual = gc.get_threshold()


def collect_rarely() -> None:
    """Run the garbage collector rarely, until `collect_as_usual`: importing makes many objects."""
    gc.set_threshold(*WHILE_IMPORTING)


def collect_as_usual() -> None:
    """Run the garbage collector as often as Python does, over objects made from now on."""
    gc.freeze()
    gc.set_threshold(*_usual)


def give_back_memory() -> None:
    """Return the memory that finished work still occupies in this process to the system.

    A model and its optimizer are in reference cycles. Python looks for these only once a fourth of
    all objects are new, and torch's alone are a million. What they occupied is kept by malloc, and
    on GPUs by torch.
    """
    gc.collect()
    torch = sys.modules.get("torch")  # importing it here would take seconds
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
TRIM_THRESHOLD_BYTES = 512 << 20  # of free memory that the process keeps
MMAP_THRESHOLD_BYTES = 32 << 20  # glibc's maximum; larger blocks are always returned


def keep_freed_memory() -> None:
    """Keep freed memory in the process, where torch's next allocation on the CPU finds it."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
        library.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
