"""report.md: a run on one page, with plots.

run_report  the page
sections    its tables and lists
costs       where time and tokens went
plots       learning curves and losses
"""

from openenv_pipe.registry import Extra

EXTRA = Extra(name="report", report="openenv_pipe.extras.report.run_report:write_report")
