"""What libraries are told before they are imported, by the command line and by the Python API."""

import os
import warnings


def set_library_defaults() -> None:
    """Set what libraries read when they are imported, unless the user has set it."""
    # torch's idle threads must sleep, not spin: the environment servers need those cores. Spinning
    # made runs up to 20 times slower on a busy machine. Read once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # In a notebook without ipywidgets, which nothing here needs.
    warnings.filterwarnings("ignore", "IProgress not found")
