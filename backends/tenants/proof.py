"""The proof that a request's tenant was set by the gateway and not by a client.

The gateway looks up the API key and sends the tenant's name with a proof: the time, and an HMAC of
name and time. The HMAC's key is the secret of the launch (launch_secret.py), which clients do not
have. A proof expires after a minute, so a proof in a log is soon useless. In a deployment whose
cluster file has `insecure: true`, the secret can be guessed, so proofs can be forged.

Not here: API keys (api_keys.py), the use of a proven tenant (principal.py).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time

from backends import launch_secret

TENANT, PROOF = "tenant", "tenant_proof"  # parameters of a request
GATEWAY = "(gateway)"  # name by which the gateway proves itself; no tenant can have this name
PURPOSE = b"mooncake tenant\0"  # makes these HMACs differ from HMACs for other purposes
AGE_S_MAX = 60.0  # seconds for which a proof is valid; clocks of hosts must differ by less


def tenant_parameters(name: str, now_unix_s: float | None = None) -> dict[str, str]:
    """Parameters for a request of this tenant, with a proof of the current time."""
    at_s = time.time() if now_unix_s is None else now_unix_s
    return {TENANT: name, PROOF: prove(name, at_s, launch_secret.secret_of_launch())}


def prove(name: str, at_unix_s: float, secret: str) -> str:
    moment = f"{at_unix_s:.3f}"
    return f"{moment} {_code(name, moment, secret)}"


def is_proven(name: str, proof: object, secret: str, now_unix_s: float) -> bool:
    """Whether `proof` proves this name and is at most AGE_S_MAX old; False without a secret."""
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
    message = PURPOSE + _bytes(name) + b"\0" + _bytes(moment)
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def _bytes(text: str) -> bytes:
    """Encodes any text of a client, even lone surrogates, which JSON may contain."""
    return text.encode("utf-8", "surrogatepass")
