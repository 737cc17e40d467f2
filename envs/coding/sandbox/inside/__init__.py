"""The child's program, run as `python -I -S <this folder>`; its files import each other by name."""
