"""The package's log on stderr: warnings by default, more with -v and -vv, as text or as JSON."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]
LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)  # by the number of times -v is given


def configure_logging(verbosity: int, form: LogFormat) -> None:
    """Write the log of `openenv_pipe` to stderr; other libraries' loggers are left alone."""
    handler = _StderrHandler()
    if form == "json":
        handler.setFormatter(_JsonFormatter())
    elif verbosity:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger = logging.getLogger("openenv_pipe")
    logger.handlers = [handler]  # those of an earlier call in this process are replaced
    logger.setLevel(LEVELS[min(verbosity, len(LEVELS) - 1)])


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what is stderr at that moment: a live progress line replaces it for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # nothing assigns it
        return sys.stderr


class _JsonFormatter(logging.Formatter):
    """One JSON object a line; times are UTC."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
