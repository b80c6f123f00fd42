"""This process as a member of a deployment: how an operator's command asks the directory.

Not here: what it asks (status.py, drain.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from backends import launch_secret
from backends.cluster.deployment import ClusterFileInvalid, Deployment
from backends.cluster.host_plan import directory_address
from mooncake_store.keys import folder as keys_folder
from mooncake_store.keys.curve import INSECURE_VARIABLE


def join_as_operator(deployment: Deployment, host: str = "") -> str:
    """The directory's address; from here on this process has the keys of `host`.

    Without a name: of the first host whose keys are on this machine. ClusterFileInvalid when there
    are none.
    """
    if deployment.is_insecure:
        os.environ[INSECURE_VARIABLE] = "1"
    if deployment.keys_folder:
        folder = _keys(deployment, host)
        os.environ[keys_folder.VARIABLE] = str(folder)
        secret = (folder / keys_folder.SECRET).read_text().strip()
    else:
        secret = launch_secret.insecure_secret(deployment.name)
    os.environ[launch_secret.SECRET_VARIABLE] = secret
    return directory_address(deployment)


def _keys(deployment: Deployment, host: str) -> Path:
    base = Path(deployment.folder) / deployment.keys_folder
    names = [host] if host else list(deployment.hosts)
    for folder in (*(base / name for name in names), base):
        if not keys_folder.problems(folder):
            return folder
    what = (
        f"keys.folder: {base} has no keys that this user may read: run this on a host of the "
        "deployment, or copy a host's folder of keys there"
    )
    raise ClusterFileInvalid(deployment.path, (what,))
