"""The secret of a launch, by which its processes know calls and messages of each other.

`mooncake serve` makes one at each start and puts it into the environment of its processes; it is in
no argument list and no log. A process without one (started by hand) knows those without one. Pure
but for the environment. Not here: where it is asked for (triton_io.py, inbox.py).
"""

from __future__ import annotations

import hmac
import os
import secrets

VARIABLE = "MOONCAKE_SECRET"
PARAMETER = "launch_secret"  # of a request to a worker model


def make() -> str:
    return secrets.token_hex(16)


def of_launch() -> str:
    return os.environ.get(VARIABLE, "")


def is_right(given: object, secret: str) -> bool:
    """In the same time whatever is given."""
    text = given if isinstance(given, str) else ""
    return hmac.compare_digest(text.encode(), secret.encode())
