"""What torch frees on a CPU stays with the process, where the next step finds it.

glibc gives large blocks back to the system at once and asks for new ones, which come page by page,
filled with zeros: a tenth of a small model's step, and more memory in the end, because blocks of
changing sizes leave gaps. Refused here: other C libraries, which are left as they are.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 512 << 20
LARGEST_BYTES = 32 << 20  # of a block: glibc takes no more; larger ones come and go


def keep_freed_memory() -> None:
    """Holds for the whole process, from now on."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES)
