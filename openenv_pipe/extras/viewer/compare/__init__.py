"""The command `compare`: how the settings of runs differ, and their results.

It only reads run folders, also of failed and running runs. To evaluate models again on the same
tasks, use `eval RUN RUN`.
"""
