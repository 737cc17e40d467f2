"""`report.md`: a run on one page with plots, and a page of each evaluation."""

from openenv_pipe.registry import Extra

EXTRA = Extra(
    name="report",
    report="openenv_pipe.extras.report.run_report:write_report",
    curves="openenv_pipe.extras.report.plots:learning_curves",
    eval_page="openenv_pipe.extras.report.eval_page:eval_page",
)
