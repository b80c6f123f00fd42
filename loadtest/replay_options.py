"""The options of `mooncake replay` as its command line reads them. Not here: what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Trace = Annotated[Path, typer.Argument(help="Trace in the published JSONL format.")]
Requests = Annotated[
    int | None, typer.Option(min=1, help="Send only the first N requests of the trace.")
]
LengthScale = Annotated[
    float, typer.Option(help="Prompts and answers are this much of the trace's lengths.")
]
Speed = Annotated[float, typer.Option(help="2 sends twice as fast as the trace.")]
Url = Annotated[str, typer.Option(help="gRPC address of the server.")]
Model = Annotated[str, typer.Option(help="Model to send to.")]
Seed = Annotated[
    int, typer.Option(min=0, max=2**63, help="Other seed, other tokens, same sharing.")
]
IgnoreEos = Annotated[
    bool, typer.Option(help="Answers are as long as the trace's, whatever is generated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON line, last.")]
Out = Annotated[
    Path | None, typer.Option(help="Write one JSON line per request, with its decision.")
]
Report = Annotated[
    Path | None, typer.Option(help="Write the run as one HTML page, for people and programs.")
]
MetricsUrl = Annotated[
    str | None,
    typer.Option(
        help="The server's metrics page, sampled for the report; by default on the port after "
        'gRPC\'s. "none" samples nothing.'
    ),
]
SloTtft = Annotated[float | None, typer.Option(help="Count goodput: TTFT of at most this.")]
SloTbt = Annotated[float | None, typer.Option(help="Count goodput: TBT of at most this.")]
BlockTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a KV block; asked of the server.")
]
ContextTokens = Annotated[
    int | None, typer.Option(min=2, help="The server's context; asked of the server.")
]
Vocabulary = Annotated[
    int | None, typer.Option(min=32, help="Number of token ids; asked of the server.")
]
Timeout = Annotated[
    float, typer.Option(min=0.1, help="A request without a complete answer has failed.")
]
Channels = Annotated[
    int, typer.Option(min=1, max=64, help="gRPC connections; requests take turns.")
]
