"""Where environment servers run: `base` is the interface, which other files implement."""
