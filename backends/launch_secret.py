"""The secret with which our processes authenticate calls to workers, and messages.

On a single machine, each start of `mooncake serve` makes a new secret. The hosts of a deployment
share one secret. The launcher puts the secret into the environment of its processes, never into an
argument list or a log. A worker without a secret, which was started by hand, rejects all calls.
Calls are checked in triton/triton_io.py, messages in workers/protocol.py.
"""

from __future__ import annotations

import hmac
import os
import secrets

SECRET_VARIABLE = "MOONCAKE_SECRET"
SECRET_PARAMETER = "launch_secret"  # name of the request parameter in calls to workers


def make_secret() -> str:
    return secrets.token_hex(16)


def insecure_secret(deployment: str) -> str:
    """The secret of a deployment without keys. It separates deployments, but can be guessed."""
    return f"insecure-{deployment}"


def secret_of_launch() -> str:
    return os.environ.get(SECRET_VARIABLE, "")


def is_right(given: object, secret: str) -> bool:
    """Compare in constant time. `given` comes from JSON, so it may have lone surrogates."""
    text = given if isinstance(given, str) else ""
    return hmac.compare_digest(text.encode("utf-8", "surrogatepass"), secret.encode())
