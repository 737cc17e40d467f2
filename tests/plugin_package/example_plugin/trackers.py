"""A tracker."""

import json


class LinesTracker:
    """Writes every record as a line of JSON into a file of the run folder."""

    def __init__(self, folder, *, file_name):
        self._file = (folder / file_name).open("w")

    def log(self, record):
        self._file.write(json.dumps(record) + "\n")

    def close(self):
        self._file.close()
