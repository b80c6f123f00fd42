"""`python -m backends.gateway`: one gateway process in front of a frontend's gRPC port.

`mooncake serve --openai-port` starts gateways (backends/launcher/gateways.py). An operator can also
start one in front of any Triton with the conductor. MOONCAKE_API_KEYS names the file of API keys.
"""

from __future__ import annotations

from typing import Annotated

import typer

from backends.gateway.app import Gateway, GatewaySettings
from backends.gateway.doors import ANY_ORIGIN, BODY_BYTES_MAX, read_origins
from backends.gateway.responses.stored import IN_MEMORY
from backends.gateway.server import Listening, serve
from backends.tenants import ApiKeys, TenantsInvalid
from backends.tracing.export import Tracing
from mooncake_store.keys.folder import KeysInvalid
from mooncake_store.process.logs import start_logging


def main(
    frontend: Annotated[str, typer.Option(help="HOST:PORT of the frontend's gRPC.")] = (
        "127.0.0.1:8001"
    ),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 9000,
    name: Annotated[str, typer.Option(help="Name of this process in metrics.")] = "gateway-0",
    shared: Annotated[
        bool, typer.Option("--shared", help="Other gateway processes use this port too.")
    ] = False,
    metrics: Annotated[
        str, typer.Option(help="HOST:PORT of the launcher's metrics page; default: its own page.")
    ] = "",
    own_metrics_port: Annotated[
        int, typer.Option(help="Loopback port of this process's metrics page; 0: none.")
    ] = 0,
    certificate: Annotated[str, typer.Option(help="PEM file: serve HTTPS.")] = "",
    private_key: Annotated[str, typer.Option(help="PEM file of its key.")] = "",
    allowed_origins: Annotated[
        str, typer.Option(help="Origins of web pages whose scripts may call it, comma separated.")
    ] = "",
    drain_s_max: Annotated[float, typer.Option(help="Limit of a drain, in seconds.")] = 30.0,
    body_bytes_max: Annotated[int, typer.Option(help="Limit of a body.")] = BODY_BYTES_MAX,
    stored_responses: Annotated[
        str, typer.Option(help="File of the responses that clients store, for all processes.")
    ] = IN_MEMORY,
) -> None:
    """OpenAI's interface in front of a frontend, until SIGTERM."""
    start_logging("%(asctime)s %(levelname).1s %(name)s %(message)s")
    try:
        keys, tracing = ApiKeys.of_process(), Tracing.of_environment()
        origins = read_origins(allowed_origins)
    except (TenantsInvalid, ValueError) as error:
        raise SystemExit(str(error)) from None
    if ANY_ORIGIN in origins and keys is None:
        raise SystemExit(f"--allowed-origins {ANY_ORIGIN} needs API keys; name the pages' origins")
    settings = GatewaySettings(frontend, metrics, name, body_bytes_max, origins, stored_responses)
    gateway = Gateway(settings, keys, tracing)
    listening = Listening(host, port, shared, certificate, private_key)
    try:
        serve(gateway, listening, drain_s_max, own_metrics_port)
    except KeysInvalid as error:
        raise SystemExit(str(error)) from None
    except OSError as error:
        raise SystemExit(f"{host}:{port} cannot be used: {error}") from None


if __name__ == "__main__":
    typer.run(main)
