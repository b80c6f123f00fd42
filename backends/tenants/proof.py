"""By what a frontend knows that its gateway, and no client, says whose request it is.

The gateway looks a key up and sends the tenant's name with a proof: when it was made, and an HMAC
of name and moment by the secret of the launch, which gateway and frontend have and no client. A
proof is worth something for a minute, so one that comes into a log is soon worth nothing. With a
deployment's `insecure` keys everybody can guess that secret, and so make proofs.

Not here: keys (api_keys.py), what the frontend does with it (principal.py).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time

from backends import launch_secret

TENANT, PROOF = "tenant", "tenant_proof"  # parameters of a request
GATEWAY = "(gateway)"  # no name of a tenant: the gateway itself asks
PURPOSE = b"mooncake tenant\0"
AGE_S_MAX = 60.0  # clocks of hosts differ by less


def tenant_parameters(name: str, now_unix_s: float | None = None) -> dict[str, str]:
    """What the gateway sends with a request of this tenant, at once: it does not keep."""
    at_s = time.time() if now_unix_s is None else now_unix_s
    return {TENANT: name, PROOF: prove(name, at_s, launch_secret.secret_of_launch())}


def prove(name: str, at_unix_s: float, secret: str) -> str:
    moment = f"{at_unix_s:.3f}"
    return f"{moment} {_code(name, moment, secret)}"


def is_proven(name: str, proof: object, secret: str, now_unix_s: float) -> bool:
    """False for whatever is no proof of this name, by this secret, of this minute."""
    if not isinstance(proof, str) or not secret:
        return False
    moment, _, code = proof.partition(" ")
    if not hmac.compare_digest(_bytes(code), _bytes(_code(name, moment, secret))):
        return False
    try:
        age_s = now_unix_s - float(moment)
    except ValueError:
        return False
    return math.isfinite(age_s) and abs(age_s) <= AGE_S_MAX


def _code(name: str, moment: str, secret: str) -> str:
    said = PURPOSE + _bytes(name) + b"\0" + _bytes(moment)
    return hmac.new(secret.encode(), said, hashlib.sha256).hexdigest()


def _bytes(text: str) -> bytes:
    """Of whatever a client sends: JSON has halves of characters that are no UTF-8."""
    return text.encode("utf-8", "surrogatepass")
