"""What runs in the child, as `python -I -S <this folder>`: its files import each other by name."""
