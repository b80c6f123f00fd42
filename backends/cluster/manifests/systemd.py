"""The systemd unit of a host.

`mooncake serve` starts again what dies below it, so systemd restarts only the launcher itself. A
stop asks the launcher alone (KillMode=mixed): it ends its processes in order, in nine seconds at
most, and the storage nodes say goodbye. Draining before a stop is the operator's decision
(`mooncake cluster drain`), not the unit's: a reboot should not wait for it.
"""

from __future__ import annotations

from backends.cluster.deployment import Deployment
from backends.cluster.host_plan import HostPlan

STOP_S_MAX = 30
THREADS_MAX = 16_384
FILES_MAX = 65_536


def unit_name(deployment: Deployment, host: str) -> str:
    """A further host of a machine has a unit of its own."""
    further = f"-{host}" if deployment.port_step(host) else ""
    return f"mooncake-{deployment.name}{further}.service"


def unit(deployment: Deployment, plan: HostPlan, program: str, folder: str, user: str) -> str:
    """`program` is the `mooncake` of that host, `folder` where its cluster file lies, and `user`
    whom it runs as; the model repository to render from lies in `folder` too."""
    cluster_file = deployment.file_name
    return f"""\
# Rendered from {cluster_file} for host {plan.host} by `mooncake cluster render systemd`.
[Unit]
Description=Mooncake deployment {deployment.name}, host {plan.host}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=exec
User={user}
WorkingDirectory={folder}
ExecStart={program} serve --cluster {folder}/{cluster_file} --host {plan.host}
Restart=on-failure
RestartSec=5
KillMode=mixed
TimeoutStopSec={STOP_S_MAX}
# RDMA registers memory, and a Triton has many threads.
LimitMEMLOCK=infinity
LimitNOFILE={FILES_MAX}
TasksMax={THREADS_MAX}
# Segments of storage nodes are in /dev/shm and must outlive a login of this user.
RemoveIPC=no
NoNewPrivileges=yes
ProtectSystem=full
ProtectHome=read-only
UMask=0077

[Install]
WantedBy=multi-user.target
"""
