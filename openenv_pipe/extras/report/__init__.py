"""report.md, a run on one page with plots, and a page of each evaluation.

run_report  the page
sections    its tables and lists
costs       where time and tokens went
eval_page   an evaluation
plots       learning curves and losses
"""

from openenv_pipe.registry import Extra

EXTRA = Extra(
    name="report",
    report="openenv_pipe.extras.report.run_report:write_report",
    eval_page="openenv_pipe.extras.report.eval_page:eval_page",
)
