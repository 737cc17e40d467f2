"""Run one submission in a process that can do nothing but compute.

`box.run` is the interface. The child process runs `inside/`; the server trusts none of its answers.
"""
