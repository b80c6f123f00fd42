"""The secret by which the processes of a launch authenticate calls and messages.

`mooncake serve` makes one secret at each start and puts it into the environment of its processes.
It is in no argument list and no log. The hosts of a deployment share one secret. A process without
a secret (started by hand) accepts only processes without one. The secret is checked in
triton/triton_io.py and workers/protocol.py.
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
    """The secret of a deployment without keys; it only separates two deployments."""
    return f"insecure-{deployment}"


def secret_of_launch() -> str:
    return os.environ.get(SECRET_VARIABLE, "")


def is_right(given: object, secret: str) -> bool:
    """Compare in constant time."""
    text = given if isinstance(given, str) else ""
    return hmac.compare_digest(text.encode(), secret.encode())
