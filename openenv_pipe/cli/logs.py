"""The package's log on stderr: warnings by default, more with -v and -vv, as text or as JSON."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from openenv_pipe.system.secrets import redact
from openenv_pipe.system.untrusted_text import for_people, visible

LogFormat = Literal["text", "json"]
LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)  # by the number of times -v is given


def configure_logging(verbosity: int, form: LogFormat) -> None:
    """Write the log of `openenv_pipe` to stderr; other libraries' loggers are left alone."""
    handler = _StderrHandler()
    if form == "json":
        handler.setFormatter(_JsonFormatter())
    elif verbosity:
        handler.setFormatter(_TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    else:
        handler.setFormatter(_TextFormatter("%(levelname)s: %(message)s"))
    logger = logging.getLogger("openenv_pipe")
    logger.handlers = [handler]  # those of an earlier call in this process are replaced
    logger.setLevel(LEVELS[min(verbosity, len(LEVELS) - 1)])


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, which a live progress line replaces for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # nothing assigns it
        return sys.stderr


class _TextFormatter(logging.Formatter):
    """Lines with messages of any origin; an exception is shown with its whole traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return for_people(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return visible(redact(super().formatException(ei)))


class _JsonFormatter(logging.Formatter):
    """One JSON object per line; times are UTC."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": for_people(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = visible(redact(self.formatException(record.exc_info)))
        return json.dumps(line, ensure_ascii=False)
