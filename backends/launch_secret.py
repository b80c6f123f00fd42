"""The secret with which the processes of one `mooncake serve` authenticate calls and messages.

`mooncake serve` makes a new secret at each start on a single machine; the hosts of a deployment
share one secret. The launcher puts the secret into the environment of its processes, never into an
argument list or a log. A worker without a secret (started by hand) rejects all calls. Calls are
checked in triton/triton_io.py, messages in workers/protocol.py.
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
    """The secret of a deployment without keys. Clients can guess it; it separates deployments."""
    return f"insecure-{deployment}"


def secret_of_launch() -> str:
    return os.environ.get(SECRET_VARIABLE, "")


def is_right(given: object, secret: str) -> bool:
    """Compare in constant time. JSON may contain lone surrogates, which are not valid UTF-8."""
    text = given if isinstance(given, str) else ""
    return hmac.compare_digest(text.encode("utf-8", "surrogatepass"), secret.encode())
