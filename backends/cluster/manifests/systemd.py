"""The systemd unit of a host.

`mooncake serve` (the launcher) restarts its child processes, and systemd restarts the launcher. At
a stop, systemd sends SIGTERM only to the launcher (KillMode=mixed), which ends its processes in
order. The unit does not drain the host, because a reboot should not wait for a drain. The operator
drains a host with `mooncake cluster drain`.
"""

from __future__ import annotations

from backends.cluster.deployment import Deployment
from backends.cluster.host_plan import HostPlan

STOP_S_MAX = 30  # seconds from SIGTERM until systemd kills all processes
THREADS_MAX = 16_384
FILES_MAX = 65_536


def unit_name(deployment: Deployment, host: str) -> str:
    """The name of the unit. It contains the host's name, unless the host is the first one of its
    machine."""
    further = f"-{host}" if deployment.port_step(host) else ""
    return f"mooncake-{deployment.name}{further}.service"


def unit(deployment: Deployment, plan: HostPlan, program: str, folder: str, user: str) -> str:
    """The text of the unit. `program`: path of `mooncake` on the host. `folder`: folder of the
    cluster file and of the model repository to render from. `user`: user of the service."""
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
