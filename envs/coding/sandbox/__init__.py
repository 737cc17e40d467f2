"""Runs one submission in a process that can do nothing but compute.

`box.run` is the whole interface. `inside/` is what the child runs; nothing it answers is trusted.
"""
