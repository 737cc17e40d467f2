"""Read rows of Hugging Face data sets as reset keywords, all before anything is started.

In a data set, all rows of a column have one type. CSV data sets are read like a .csv file.
"""

import csv
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from openenv_pipe.config.schema import TaskDataset
from openenv_pipe.environments.tasks.rows import (
    Row,
    Rows,
    check_columns,
    check_header,
    read_column,
    require_values,
    row_labels,
)
from openenv_pipe.environments.tasks.sets import Labels
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.optional_packages import needed_by


def read_dataset(config: TaskDataset, key: str) -> Rows:
    """Load the rows of a data set's split.

    Raises:
        ConfigError: `datasets` is not installed, or the data set or a column cannot be read.
    """
    with needed_by(f"{key}.type=dataset", "datasets"):
        import datasets
    load = partial(
        datasets.load_dataset,
        config.path,
        config.config,
        split=config.split,
        revision=config.revision,
        data_files=config.data_files,
    )
    try:
        rows = load()
        if rows.info.builder_name == "csv":
            check_header(rows.column_names, config.columns)
            rows = _csv_dataset(load, rows.column_names)
    except Exception as error:  # `datasets` raises many kinds: no such id, file, split, network
        cause = error
        if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__:
            cause = error.__cause__  # of a file that cannot be read, which the error does not name
        first_line = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise ConfigError(f"{key}: cannot load data set {config.path!r}: {first_line}") from error
    for columns in (config.columns or {}, {column: column for column in config.labels}):
        check_columns(columns, rows.column_names, f"{key}: {config.path!r}", key)
    read: Row = dict.fromkeys(rows.column_names)
    labels: list[Labels] = []
    if config.labels:
        labels = [
            row_labels(row, config.labels, f"{key}: {config.path}, row {number}", key)
            for number, row in enumerate(rows.select_columns(config.labels), start=1)
        ]
    if config.columns is None:
        rows = rows.remove_columns(config.labels)
    else:
        rows = rows.select_columns(list(config.columns)).rename_columns(
            {column: keyword for column, keyword in config.columns.items() if column != keyword}
        )
    if config.required:
        names = rows.column_names
        known = [name for name in config.required if name in names]
        for number, row in enumerate(rows.select_columns(known or names[:1]), start=1):
            where = f"{key}: {config.path}, row {number}"
            require_values(row, config, read, where, key)
    return Rows(rows, labels)


def _csv_dataset(load: Callable[..., Any], names: Sequence[str]) -> Any:
    """Load a data set of CSV files again, as text, and type its columns as those of a .csv file.

    `datasets` would read 007 as 7, and NA as nothing. In a row with more cells than the header it
    would drop the first, and what a shorter row lacks it would read as empty text.

    Raises ValueError, or what `datasets` makes of a warning, if a row has more or fewer cells.
    """
    from datasets import Features, Value

    text = Features({name: Value("string") for name in names})
    csv.field_size_limit(sys.maxsize)  # A prompt may be longer than the default of 128 KiB.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Length of header or names does not match")
        # Of the engines of pandas, only this one tells a missing cell from an empty one.
        rows = load(
            features=text,
            keep_default_na=False,
            na_filter=False,
            index_col=False,
            engine="python",
        )
    types = {bool: "bool", int: "int64", float: "float64"}
    for name in names:
        cells = list(rows[name])
        if None in cells:
            raise ValueError(f"row {cells.index(None) + 1} has fewer cells than the header")
        kinds = {type(value) for value in read_column(cells)}
        # A column of a data set has one type: with 7 and 2.5 in it, it stays text.
        if len(kinds) == 1 and (kind := types.get(kinds.pop())):
            rows = rows.cast_column(name, Value(kind))
    return rows
