"""How a process of ours writes its log: lines for people, or one JSON object per line.

Which of both says the environment, so that all processes of a launch agree. Lines of other programs
(Triton's own, etcd's) stand between ours in the same file, and stay as they are.

A JSON line has `time` (UTC), `level`, `logger`, `pid` and `message`; what a line says of a request
also has `request_id` and, where its client or our tracing gave one, `trace_id`. Exceptions are in
`exception`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

FORMAT_VARIABLE = "MOONCAKE_LOG_FORMAT"  # "json"; anything else: text
OF_A_REQUEST = ("request_id", "trace_id")  # names in `extra` of a log call


def start_logging(
    text_format: str, level: int | str = logging.INFO, is_forced: bool = False
) -> None:
    """To stderr, which the launcher keeps in a file; `text_format` where no JSON is wanted.
    `is_forced`: whoever has set handlers up in this process before loses them."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = os.environ.get(FORMAT_VARIABLE) == "json"
    handler.setFormatter(JsonLines() if is_json else logging.Formatter(text_format))
    logging.basicConfig(level=level, handlers=[handler], force=is_forced)


class JsonLines(logging.Formatter):
    """One line each, whatever is in the message."""

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
