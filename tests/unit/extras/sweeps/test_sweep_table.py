"""The progress of a sweep."""

from io import StringIO

import pytest
from test_progress import _Terminal

from openenv_pipe.extras.sweeps.cli import SweepTable
from openenv_pipe.system.tables import Column, Table


@pytest.mark.parametrize(("stream", "is_live"), [(_Terminal(), True), (StringIO(), False)])
def test_a_sweep_is_a_table_on_terminals_and_lines_in_files(stream, is_live):
    progress = SweepTable(stream)
    progress.table(lambda: Table(Column("the table")))
    progress.job("job 0 running")
    progress.note("best: job 0")
    progress.end_table()
    shown = stream.getvalue()
    assert "best: job 0" in shown
    assert ("the table" in shown) == is_live and ("job 0 running" in shown) != is_live
