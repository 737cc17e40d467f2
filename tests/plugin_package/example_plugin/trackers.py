"""A tracker."""

import json

from openenv_pipe.trackers.base import Opened


class LinesTracker:
    """Writes every record as a line of JSON into a file of the run folder."""

    def __init__(self, folder, *, file_name):
        self._path = folder / file_name

    def open(self, run):
        self._file = self._path.open("w")
        return Opened(run_id=None)  # a resumed run writes all lines again

    def log(self, step):
        self._file.write(json.dumps(step.record) + "\n")

    def close(self, status, summary):
        self._file.close()


def build_lines_tracker(key, config, folder):
    return LinesTracker(folder, file_name=config.file_name)
