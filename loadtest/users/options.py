"""The options that this load test adds to Locust's own, in a group of their own in `--help`.

Those that make sense there also stand in the form of Locust's web page, so all values are text or
numbers that a form can hold; settings.py reads them. Locust's defaults are changed where they do
not suit: requests in flight get a grace at the end, and the web page listens on this host only.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from loadtest.users.settings import HOST, MODELS, PROTOCOLS, WORKLOADS, Sizes, TraceSettings

STOP_S_DEFAULT = 15
WEB_HOST_DEFAULT = "127.0.0.1"
SIZES, TRACE = Sizes(), TraceSettings()


@dataclass(frozen=True, slots=True)
class Option:
    flag: str
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
    is_in_web: bool = True


OPTIONS = (
    Option("--protocol", "grpc", "How to send: gRPC streams or HTTP generate_stream.", PROTOCOLS),
    Option("--target-model", "conductor", "Model to send to.", MODELS),
    Option(
        "--workload",
        "chat:3,shared:1,document:1",
        f"What users do: one of {', '.join(WORKLOADS)}, or a mix such as chat:3,burst:1. trace "
        "stands alone; then --users is ignored.",
    ),
    Option("--seed", 0, "Same seed, same users, texts and pauses."),
    Option("--think-s", SIZES.think_s, "Mean pause before the next request, +- 50 %%."),
    Option("--answer-tokens", SIZES.answer_tokens, "Longest answer."),
    Option("--question-tokens", SIZES.question_tokens, "Length of a question, about."),
    Option("--chat-turns", SIZES.chat_turns, "chat: turns of a conversation; then a new one."),
    Option("--system-tokens", SIZES.system_tokens, "shared: length of the common system prompt."),
    Option("--document-tokens", SIZES.document_tokens, "document: length of a document."),
    Option("--document-questions", SIZES.document_questions, "document: questions about each."),
    Option("--burst-requests", SIZES.burst_requests, "burst: requests at once, per user."),
    Option("--burst-every-s", SIZES.burst_every_s, "burst: all users fire at multiples of this."),
    Option("--trace", "", "trace: file in the published JSONL format.", is_in_web=False),
    Option("--trace-requests", 0, "trace: only the first N requests (0: all).", is_in_web=False),
    Option(
        "--trace-length-scale",
        TRACE.length_scale,
        "trace: prompts and answers are this much of the trace's lengths.",
        is_in_web=False,
    ),
    Option("--trace-speed", TRACE.speed, "trace: 2 sends twice as fast.", is_in_web=False),
    Option(
        "--slo-ttft-p90",
        "10x",
        "P90 of TTFT must be at most this: seconds (0.5), a multiple of an unloaded request's "
        "(10x, as in the paper), or none.",
    ),
    Option("--slo-tbt-p90", "5x", "The same for TBT."),
    Option(
        "--min-goodput",
        "",
        "Requests within both limits must be at least this: 2.5 (per second) or 90%% (of all).",
    ),
    Option("--unloaded-requests", 5, "Unloaded requests measured first, of each workload."),
    Option("--request-s-max", 120.0, "A request without a complete answer by then has failed."),
    Option(
        "--metrics-url",
        "",
        "Server's metrics page for the report; by default the port after gRPC's. none: not asked.",
        is_in_web=False,
    ),
    Option("--report", "", "Write the run as one HTML page.", is_in_web=False),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "Mooncake options",
        "What users send, which limits the run must keep, and where its report goes. --host is "
        f"the server's gRPC address (default {HOST}) or http://HOST:PORT.",
    )
    group.add_argument("--url", dest="host", metavar="HOST:PORT", help="The same as --host.")
    for option in OPTIONS:
        action = group.add_argument(
            option.flag,
            default=option.default,
            type=type(option.default),
            choices=option.choices,
            help=f"{option.help} (default: {option.default})" if option.default else option.help,
        )
        # Locust's form shows what has these; its own add_argument sets them, a group's does not.
        action.include_in_web_ui = option.is_in_web  # type: ignore[attr-defined]
        action.is_secret = action.is_required = action.is_multiple = False  # type: ignore[attr-defined]
    parser.set_defaults(stop_timeout=STOP_S_DEFAULT, web_host=WEB_HOST_DEFAULT)
