"""The settings of a run: the options beside Locust's own, and their meaning.

The options have a group of their own in `--help`. Some of them are also in the form of Locust's web
page, so all values are text or numbers. They arrive as Locust keeps them: from the command line,
from the form (as text), or from the master. Each option parses its own value, and all mistakes are
reported at once.

Two of Locust's defaults change: requests in flight get a grace at the end, and the web page listens
on this host only.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.client.openai_server import ADDRESS as GATEWAY
from loadtest.client.openai_server import HttpAddress, http_address, own_key
from loadtest.client.server import Addresses, addresses_of
from loadtest.replay.datasets import DATA_SETS
from loadtest.replay.trace import TraceSettings
from loadtest.results.recording import Setting
from loadtest.users.tenants import LoadTenant, read_keys, shown, tenants, without_keys

TEXTS = ("chat", "shared", "document", "burst", "decode")
WORKLOADS = (*TEXTS, *DATA_SETS, "trace")
TRITON_VIAS, OPENAI_VIAS = ("grpc", "http"), ("openai", "openai-chat")
VIAS = TRITON_VIAS + OPENAI_VIAS
MODELS = ("conductor", "ensemble")
HOST = "127.0.0.1:8001"
STOP_S_DEFAULT = 15
WEB_HOST_DEFAULT = "127.0.0.1"


class SettingsError(ValueError):
    """The options are wrong; the message names every mistake."""


@dataclass(frozen=True, slots=True)
class LevelLimit:
    """An upper bound: seconds, a multiple of an unloaded request's time, or neither."""

    seconds: float | None = None
    times_unloaded: float | None = None


@dataclass(frozen=True, slots=True)
class MinGoodput:
    """A lower bound: requests per second, or a share of all requests, or neither."""

    requests_per_s: float | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of users' prompts and answers, and their pauses. The defaults suit the demo model."""

    think_s: float = 5.0
    answer_tokens: int = 96
    question_tokens: int = 40
    chat_turns: int = 8
    system_tokens: int = 1_024
    document_tokens: int = 2_000
    document_questions: int = 4
    burst_requests: int = 4
    burst_every_s: float = 10.0
    decode_tokens: int = 512


SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class LoadSettings:
    addresses: Addresses | None  # of Triton; None: `gateway` is used
    via: str
    model: str  # of Triton
    mix: Mapping[str, int]
    seed: int
    sizes: Sizes
    length_scale: float  # of data sets, <= 1
    trace: TraceSettings | None
    ttft_limit: LevelLimit
    tbt_limit: LevelLimit
    min_goodput: MinGoodput
    unloaded_requests: int
    request_s_max: float
    metrics_url: str | None
    report: Path | None
    gateway: HttpAddress | None = None  # of OpenAI's interface
    # API key for the gateway, for tenants without their own
    key: str = field(default="", repr=False)
    tenants: tuple[LoadTenant, ...] = ()

    @property
    def url(self) -> str:
        if self.gateway is not None:
            return self.gateway.url
        assert self.addresses is not None
        return self.addresses.grpc if self.via == "grpc" else self.addresses.http

    @property
    def any_key(self) -> str:
        """The API key for questions that belong to no tenant."""
        return next((tenant.key for tenant in self.tenants if tenant.key), self.key)

    @property
    def page_key(self) -> str:
        """The API key for the metrics page, where that page is the gateway's."""
        if self.gateway is None or self.metrics_url is None:
            return ""
        return self.gateway.key_for(self.metrics_url, self.any_key)

    def described(self) -> dict[str, Setting]:
        found: dict[str, Setting] = {
            "url": self.url,
            "via": self.via,
            "model": self.model,
            "workload": mix_text(self.mix),
            "seed": self.seed,
        }
        if self.tenants:
            found["tenants"] = shown(self.tenants)
        if DATA_SETS.keys() & self.mix.keys():
            found["length_scale"] = self.length_scale
        if self.trace is None:
            return found | dataclasses.asdict(self.sizes)
        return found | dataclasses.asdict(self.trace) | {"path": self.trace.path.name}


def address(text: str) -> Addresses:
    """The server by its gRPC address, or by its HTTP address with http:// before it."""
    scheme, _, rest = text.rstrip("/").rpartition("://")
    host, _, port = rest.rpartition(":")
    if scheme not in ("", "grpc", "http") or not host or not port.isdecimal():
        raise ValueError(
            f"{text!r} is not an address; write 127.0.0.1:8001 (gRPC) or http://127.0.0.1:8000"
        )
    return addresses_of(f"{host}:{int(port) + 1}" if scheme == "http" else rest)


def mix(text: str) -> dict[str, int]:
    """`chat:3,burst:1` as weights; a name alone weighs 1."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = part.partition(":")
        if name not in WORKLOADS:
            raise ValueError(f"{name!r} is not a workload; choose from {', '.join(WORKLOADS)}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        if weight and not (weight.isdecimal() and int(weight) > 0):
            raise ValueError(
                f"{weight!r} is not a weight of {name}; write a whole number of at least 1"
            )
        found[name] = int(weight or 1)
    if not found:
        raise ValueError("no workload is given; write chat or chat:3,burst:1")
    return found


def mix_text(weights: Mapping[str, int]) -> str:
    return ",".join(f"{name}:{weight}" for name, weight in weights.items())


def limit(text: str) -> LevelLimit:
    """`10x` unloaded, `0.5` seconds, or `none`."""
    text = (text or "").strip()
    if text in ("", "none"):
        return LevelLimit()
    is_multiple = text.endswith("x")
    value = _positive(text.removesuffix("x"), "0.5 (seconds), 10x (unloaded) or none")
    return LevelLimit(times_unloaded=value) if is_multiple else LevelLimit(seconds=value)


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
        raise ValueError(f"{text!r} is not a positive number; write {examples}")
    return value


def file(value: Any) -> Path | None:
    return Path(value) if value else None


def number(least: float, most: float, is_whole: bool = False) -> Callable[[Any], Any]:
    what = "a whole number" if is_whole else "a number"

    def read(value: Any) -> float | int:
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = math.nan
        if not least <= found <= most or (is_whole and found != int(found)):
            raise ValueError(f"{value!r} is not {what} from {least:g} to {most:g}")
        return int(found) if is_whole else found

    return read


@dataclass(frozen=True, slots=True)
class LoadOption:
    flag: str
    default: Any
    help: str
    parse: Callable[[Any], Any] = str  # raises ValueError
    choices: tuple[str, ...] | None = None
    is_in_web: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    def read(self, value: Any) -> Any:
        if self.choices and value not in self.choices:
            raise ValueError(f"{value!r} is none of {', '.join(self.choices)}")
        return self.parse(value)


def size(flag: str, help_text: str) -> LoadOption:
    """An option of `Sizes`: a positive number, whole if its default is."""
    name = flag.removeprefix("--").replace("-", "_")
    default = getattr(SIZES, name)
    is_whole = isinstance(default, int)
    least = 1 if is_whole else 0 if name == "think_s" else 0.1
    return LoadOption(flag, default, help_text, number(least, 1e6, is_whole))


OPTIONS = (
    LoadOption(
        "--via",
        "grpc",
        "How to send. Triton: grpc, or http (generate_stream). OpenAI's "
        f"interface at --host (default {GATEWAY}): openai (/v1/completions, the same "
        "prompts) or openai-chat (/v1/chat/completions).",
        choices=VIAS,
        aliases=("--protocol",),
    ),
    LoadOption("--target-model", "conductor", "Triton's model to send to.", choices=MODELS),
    LoadOption(
        "--tenants",
        "",
        "Tenants of the users: NAME[:WEIGHT][@PRIORITY], such as acme:3,batch:1@-1; each "
        "has lines of its own in statistics and report. Without a key its name is sent.",
        tenants,
    ),
    LoadOption(
        "--tenant-keys",
        "",
        "File with a line TENANT KEY for each of --tenants, for --via openai. One key for "
        "all goes into OPENAI_API_KEY.",
        file,
        is_in_web=False,
    ),
    LoadOption(
        "--workload",
        "chat:3,shared:1,document:1",
        f"What users do: one of {', '.join(WORKLOADS)}, or a mix such as chat:3,burst:1. "
        "trace stands alone; then --users is ignored.",
        mix,
    ),
    LoadOption(
        "--seed", 0, "Same seed, same users, texts and pauses.", number(0, 2**63, is_whole=True)
    ),
    size("--think-s", "Mean pause before the next request, +- 50 %%."),
    size("--answer-tokens", "Longest answer."),
    size("--question-tokens", "Length of a question, about."),
    size("--chat-turns", "chat: turns of a conversation; then a new one."),
    size("--system-tokens", "shared: length of the common system prompt."),
    size("--document-tokens", "document: length of a document."),
    size("--document-questions", "document: questions about each."),
    size("--burst-requests", "burst: requests at once, per user."),
    size("--burst-every-s", "burst: all users fire at multiples of this."),
    size("--decode-tokens", "decode: length of every answer."),
    LoadOption(
        "--length-scale",
        1.0,
        "Data sets and trace: prompts and answers are this much of their lengths.",
        number(1e-6, 1e3),
        aliases=("--trace-length-scale",),
    ),
    LoadOption(
        "--trace",
        "",
        "trace: file in the published JSONL format, or a data set's name: then it arrives "
        "at random, --trace-speed requests a second.",
        file,
        is_in_web=False,
    ),
    LoadOption(
        "--trace-requests",
        0,
        "trace: only the first N requests (0: all).",
        number(0, 10**9, is_whole=True),
        is_in_web=False,
    ),
    LoadOption(
        "--trace-speed", 1.0, "trace: 2 sends twice as fast.", number(1e-6, 1e6), is_in_web=False
    ),
    LoadOption(
        "--slo-ttft-p90",
        "10x",
        "P90 of TTFT must be at most this: seconds (0.5), a multiple of an unloaded "
        "request's (10x, as in the paper), or none.",
        limit,
    ),
    LoadOption("--slo-tbt-p90", "5x", "The same for TBT.", limit),
    LoadOption(
        "--min-goodput",
        "",
        "Requests within both limits must be at least this: 2.5 (per second) or 90%% (of all).",
        min_goodput,
    ),
    LoadOption(
        "--unloaded-requests",
        5,
        "Unloaded requests measured first, of each workload.",
        number(1, 100, is_whole=True),
    ),
    LoadOption(
        "--request-s-max",
        120.0,
        "A request without a complete answer by then has failed.",
        number(0.1, 86_400.0),
    ),
    LoadOption(
        "--metrics-url",
        "",
        "Server's metrics page for the report; by default the port after gRPC's. none: not asked.",
        lambda value: (value or "").strip(),
        is_in_web=False,
    ),
    LoadOption("--report", "", "Write the run as one HTML page.", file, is_in_web=False),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "Mooncake options",
        "What users send, which limits the run must keep, and where its report goes. --host is "
        f"the server's gRPC address (default {HOST}), or http://HOST:PORT.",
    )
    group.add_argument("--url", dest="host", metavar="HOST:PORT", help="The same as --host.")
    for option in OPTIONS:
        action = group.add_argument(
            option.flag,
            *option.aliases,
            default=option.default,
            type=type(option.default),
            choices=option.choices,
            help=f"{option.help} (default: {option.default})" if option.default else option.help,
        )
        # Locust's form shows options with these attributes; its add_argument sets them, a group's
        # does not.
        action.include_in_web_ui = option.is_in_web  # type: ignore[attr-defined]
        action.is_secret = action.is_required = action.is_multiple = False  # type: ignore[attr-defined]
    parser.set_defaults(stop_timeout=STOP_S_DEFAULT, web_host=WEB_HOST_DEFAULT)


def default_host(via: str) -> str:
    return GATEWAY if via in OPENAI_VIAS else HOST


def settings_of(options: Mapping[str, Any], host: str | None) -> LoadSettings:
    """The settings of these options; SettingsError with every mistake."""
    problems: list[str] = []

    def checked(flag: str, read: Callable[[Any], Any], value: Any) -> Any:
        try:
            return read(value)
        except ValueError as error:
            problems.append(f"{flag}: {error}")
            return None

    read = {o.name: checked(o.flag, o.read, options[o.name]) for o in OPTIONS}
    gateway = addresses = None
    host = host or default_host(read["via"])
    if read["via"] in OPENAI_VIAS:
        gateway = checked("--host", http_address, host)
    else:
        addresses = checked("--host", address, host)
    if not problems:
        problems += contradictions(read)
    with_keys = read["tenants"] or ()
    if read["tenant_keys"] is not None and not problems:
        with_keys = checked(
            "--tenant-keys", lambda path: keyed(with_keys, path), read["tenant_keys"]
        )
    if problems:
        raise SettingsError("; ".join(problems))
    metrics_url = read["metrics_url"] or (gateway or addresses).metrics_url
    trace = TraceSettings(
        path=read["trace"],
        requests_max=read["trace_requests"] or None,
        length_scale=read["length_scale"],
        speed=read["trace_speed"],
        seed=read["seed"],
    )
    return LoadSettings(
        addresses=addresses,
        via=read["via"],
        model=read["target_model"],
        mix=read["workload"],
        seed=read["seed"],
        length_scale=read["length_scale"],
        sizes=Sizes(**{field.name: read[field.name] for field in dataclasses.fields(Sizes)}),
        trace=trace if "trace" in read["workload"] else None,
        ttft_limit=read["slo_ttft_p90"],
        tbt_limit=read["slo_tbt_p90"],
        min_goodput=read["min_goodput"],
        unloaded_requests=read["unloaded_requests"],
        request_s_max=read["request_s_max"],
        metrics_url=metrics_url if metrics_url != "none" else None,
        report=read["report"],
        gateway=gateway,
        key=own_key() if gateway is not None else "",
        tenants=with_keys,
    )


def keyed(found: tuple[LoadTenant, ...], path: Path) -> tuple[LoadTenant, ...]:
    try:
        keys = read_keys(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if missing := without_keys(found, keys):
        raise ValueError(
            f"{path} has no key of {', '.join(missing)}; add a line TENANT KEY for each "
            "(`mooncake tenants add` makes one)"
        )
    return tuple(dataclasses.replace(tenant, key=keys[tenant.name]) for tenant in found)


def contradictions(read: Mapping[str, Any]) -> list[str]:
    found = []
    if read["via"] in OPENAI_VIAS and read["target_model"] != "conductor":
        found.append(
            f"--via {read['via']} uses the gateway, which serves the model conductor only; "
            f"leave out --target-model {read['target_model']}"
        )
    if read["tenant_keys"] is not None and not read["tenants"]:
        found.append("--tenant-keys is for --tenants; name them, such as --tenants acme:3,batch:1")
    if read["tenant_keys"] is not None and read["via"] not in OPENAI_VIAS:
        found.append(f"--tenant-keys: API keys are for --via openai, not for {read['via']}")
    if by_ids := [name for name in read["workload"] if name not in TEXTS]:
        what = f"--workload {', '.join(by_ids)} sends token ids, which"
        if read["target_model"] != "conductor":
            found.append(f"{what} only --target-model conductor takes, not {read['target_model']}")
        if read["via"] == "openai-chat":
            found.append(f"{what} a chat does not take; use --via openai")
    if "trace" in read["workload"]:
        if len(read["workload"]) > 1:
            found.append("--workload trace cannot be mixed: the trace says when requests arrive")
        if read["trace"] is None:
            found.append("--workload trace needs --trace FILE")
    return found
