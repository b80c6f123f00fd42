"""Log format of all processes: text lines, or one JSON object per line.

An environment variable selects the format, so that all processes of a launch use the same format.
Other programs (Triton, etcd) write their lines to the same file in their own format.

A JSON line has `time` (UTC), `level`, `logger`, `pid` and `message`. A line about a request also
has `request_id` and, if one was set, `trace_id`. Exceptions are in `exception`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

FORMAT_VARIABLE = "MOONCAKE_LOG_FORMAT"  # "json"; anything else: text
OF_A_REQUEST = ("request_id", "trace_id")  # fields in `extra` of a log call


def start_logging(
    text_format: str, level: int | str = logging.INFO, is_forced: bool = False
) -> None:
    """Log to stderr, which the launcher redirects to a file, in `text_format` or as JSON. If the
    root logger has handlers, this call replaces them if `is_forced`, and else changes nothing."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = os.environ.get(FORMAT_VARIABLE) == "json"
    handler.setFormatter(JsonLines() if is_json else logging.Formatter(text_format))
    logging.basicConfig(level=level, handlers=[handler], force=is_forced)


class JsonLines(logging.Formatter):
    """Formats each record as one line, even if its message has several."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        line |= {name: given for name in OF_A_REQUEST if (given := getattr(record, name, ""))}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)
