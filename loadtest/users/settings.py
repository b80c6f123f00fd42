"""What a run was asked to be: every option, checked and in its own unit.

The options arrive as Locust keeps them: from the command line, from the form of its web page (there
as text), or from the master. All mistakes are named at once. Not here: the options' names and help
(options.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.client.server import Addresses, addresses_of

WORKLOADS = ("chat", "shared", "document", "burst", "trace")
PROTOCOLS = ("grpc", "http")
MODELS = ("conductor", "ensemble")
HOST = "127.0.0.1:8001"


class SettingsError(ValueError):
    """The options make no sense; the message names every mistake."""


@dataclass(frozen=True, slots=True)
class Limit:
    """An upper bound: seconds, or a multiple of what an unloaded request takes, or neither."""

    seconds: float | None = None
    times_unloaded: float | None = None


@dataclass(frozen=True, slots=True)
class MinGoodput:
    """A lower bound: requests per second, or a share of all requests, or neither."""

    requests_per_s: float | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much users send and how long they think. The defaults suit the demo model."""

    think_s: float = 5.0
    answer_tokens: int = 96
    question_tokens: int = 40
    chat_turns: int = 8
    system_tokens: int = 1_024
    document_tokens: int = 2_000
    document_questions: int = 4
    burst_requests: int = 4
    burst_every_s: float = 10.0


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Which part of which trace, and how fast and large."""

    path: Path | None = None
    requests_max: int | None = None
    length_scale: float = 1.0
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    addresses: Addresses
    protocol: str
    model: str
    mix: Mapping[str, int]
    seed: int
    sizes: Sizes
    trace: TraceSettings
    ttft_limit: Limit
    tbt_limit: Limit
    min_goodput: MinGoodput
    unloaded_requests: int
    request_s_max: float
    metrics_url: str | None
    report: Path | None

    @property
    def is_trace(self) -> bool:
        return "trace" in self.mix

    def described(self) -> dict[str, str | int | float | bool | None]:
        """Flat, for a recording."""
        found: dict[str, str | int | float | bool | None] = {
            "url": self.addresses.grpc if self.protocol == "grpc" else self.addresses.http,
            "protocol": self.protocol,
            "model": self.model,
            "workload": mix_text(self.mix),
            "seed": self.seed,
        }
        if self.is_trace:
            trace = dataclasses.asdict(self.trace)
            return found | trace | {"path": self.trace.path.name if self.trace.path else None}
        return found | dataclasses.asdict(self.sizes)


def settings_of(options: Mapping[str, Any], host: str | None) -> Settings:
    """Raises SettingsError with every mistake."""
    read = _Reader(options)
    settings = Settings(
        addresses=read.checked("--host", address, host or HOST),
        protocol=read.one_of("protocol", PROTOCOLS),
        model=read.one_of("target_model", MODELS),
        mix=read.checked("--workload", mix, options["workload"]),
        seed=int(read.number("seed", 0, 2**63, is_whole=True)),
        sizes=read.sizes(),
        trace=TraceSettings(
            path=Path(options["trace"]) if options["trace"] else None,
            requests_max=int(read.number("trace_requests", 0, 10**9, is_whole=True)) or None,
            length_scale=read.number("trace_length_scale", 1e-6, 1e3),
            speed=read.number("trace_speed", 1e-6, 1e6),
        ),
        ttft_limit=read.checked("--slo-ttft-p90", limit, options["slo_ttft_p90"]),
        tbt_limit=read.checked("--slo-tbt-p90", limit, options["slo_tbt_p90"]),
        min_goodput=read.checked("--min-goodput", min_goodput, options["min_goodput"]),
        unloaded_requests=int(read.number("unloaded_requests", 1, 100, is_whole=True)),
        request_s_max=read.number("request_s_max", 0.1, 86_400.0),
        metrics_url=None,
        report=Path(options["report"]) if options["report"] else None,
    )
    read.problems += contradictions(settings) if not read.problems else []
    if read.problems:
        raise SettingsError("; ".join(read.problems))
    metrics_url = (options["metrics_url"] or "").strip()
    if metrics_url != "none":
        metrics_url = metrics_url or settings.addresses.metrics_url
        settings = dataclasses.replace(settings, metrics_url=metrics_url)
    return settings


def contradictions(settings: Settings) -> list[str]:
    found = []
    if settings.is_trace and len(settings.mix) > 1:
        found.append("--workload trace cannot be mixed: the trace says when requests arrive")
    if settings.is_trace and settings.model != "conductor":
        found.append(
            "--workload trace sends token ids, which only --target-model conductor takes, not "
            f"{settings.model}"
        )
    if settings.is_trace and settings.trace.path is None:
        found.append("--workload trace needs --trace FILE")
    return found


def address(text: str) -> Addresses:
    """The server by its gRPC address, or by its HTTP address when http:// stands before it."""
    scheme, _, rest = text.rstrip("/").rpartition("://")
    host, _, port = rest.rpartition(":")
    if scheme not in ("", "grpc", "http") or not host or not port.isdigit():
        raise ValueError(
            f"{text!r} is no address; write 127.0.0.1:8001 (gRPC) or http://127.0.0.1:8000"
        )
    return addresses_of(f"{host}:{int(port) + 1}" if scheme == "http" else rest)


def mix(text: str) -> dict[str, int]:
    """`chat:3,burst:1` as weights; a name alone weighs 1."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = part.partition(":")
        if name not in WORKLOADS:
            raise ValueError(f"{name!r} is no workload; choose from {', '.join(WORKLOADS)}")
        if name in found:
            raise ValueError(f"{name} stands there twice")
        if weight and not (weight.isdigit() and int(weight) > 0):
            raise ValueError(f"{weight!r} is no weight of {name}; write a whole number from 1 on")
        found[name] = int(weight or 1)
    if not found:
        raise ValueError("it names no workload; write chat or chat:3,burst:1")
    return found


def mix_text(weights: Mapping[str, int]) -> str:
    return ",".join(f"{name}:{weight}" for name, weight in weights.items())


def limit(text: str) -> Limit:
    """`10x` unloaded, `0.5` seconds, or `none`."""
    text = (text or "").strip()
    if text in ("", "none"):
        return Limit()
    is_multiple = text.endswith("x")
    value = _positive(text.removesuffix("x"), "0.5 (seconds), 10x (unloaded) or none")
    return Limit(times_unloaded=value) if is_multiple else Limit(seconds=value)


def min_goodput(text: str) -> MinGoodput:
    """`2.5` requests per second, `90%` of all requests, or nothing."""
    text = (text or "").strip()
    if text in ("", "none"):
        return MinGoodput()
    value = _positive(text.removesuffix("%"), "2.5 (requests/s) or 90%")
    if not text.endswith("%"):
        return MinGoodput(requests_per_s=value)
    if value > 100:
        raise ValueError(f"{text} of the requests cannot be reached")
    return MinGoodput(share=value / 100)


def _positive(text: str, examples: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{text!r} is no positive number; write {examples}")
    return value


class _Reader:
    """Reads single options and keeps what is wrong with them."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self.problems: list[str] = []

    def checked(self, name: str, parse: Any, text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            self.problems.append(f"{name}: {error}")
            return None

    def one_of(self, name: str, choices: tuple[str, ...]) -> str:
        value = str(self._options[name])
        if value not in choices:
            self.problems.append(f"{_flag(name)}: {value!r} is none of {', '.join(choices)}")
        return value

    def number(self, name: str, least: float, most: float, is_whole: bool = False) -> float:
        try:
            value = float(self._options[name])
        except (TypeError, ValueError):
            value = math.nan
        if not least <= value <= most or (is_whole and value != int(value)):
            what = "a whole number" if is_whole else "a number"
            self.problems.append(
                f"{_flag(name)}: {self._options[name]!r} is not {what} from {least:g} to {most:g}"
            )
            return least
        return value

    def sizes(self) -> Sizes:
        found: dict[str, Any] = {}
        for field in dataclasses.fields(Sizes):
            is_whole = isinstance(field.default, int)
            least = 1.0 if is_whole else 0.0 if field.name == "think_s" else 0.1
            value = self.number(field.name, least, 1e6, is_whole)
            found[field.name] = int(value) if is_whole else value
        return Sizes(**found)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
