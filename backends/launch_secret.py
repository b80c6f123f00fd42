"""By what the processes of a launch know calls and messages of each other.

`mooncake serve` makes one secret at each start and puts it into the environment of its processes;
it is in no argument list and no log. The hosts of a deployment have one in common. A process
without one (started by hand) knows those without one. It is asked for in triton/triton_io.py and
workers/protocol.py.
"""

from __future__ import annotations

import hmac
import os
import secrets

SECRET_VARIABLE = "MOONCAKE_SECRET"
SECRET_PARAMETER = "launch_secret"  # of a request to a worker model


def make_secret() -> str:
    return secrets.token_hex(16)


def insecure_secret(deployment: str) -> str:
    """Of a deployment without keys: it only keeps two deployments apart."""
    return f"insecure-{deployment}"


def secret_of_launch() -> str:
    return os.environ.get(SECRET_VARIABLE, "")


def is_right(given: object, secret: str) -> bool:
    """In the same time whatever is given."""
    text = given if isinstance(given, str) else ""
    return hmac.compare_digest(text.encode(), secret.encode())
