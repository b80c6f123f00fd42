"""A Kustomize component for clusters with Prometheus: monitoring, and pools that follow the load.

It needs Prometheus Operator (ServiceMonitor) and an adapter that serves Prometheus' series as
metrics of Kubernetes. Pools follow two of them, whichever asks for more workers: how many requests
are live at all (the conductor's own count, which grows before any worker is late), and how many
wait at the pool's workers.
"""

from __future__ import annotations

from backends.cluster.deployment import Deployment, PoolSpec
from backends.cluster.manifests.pods import (
    METRICS,
    Document,
    documents_text,
    labels,
    metadata,
    selector,
)

LIVE, WAITING = "mooncake_requests_live", "mooncake_requests_waiting"  # docs/metrics.md
INSTANCE = "app.kubernetes.io/instance"
SERIES_LABEL = "app_kubernetes_io_instance"  # as Prometheus writes it
LIVE_PER_WORKER = 16  # requests in flight that a worker of either pool is to have
WAITING_PER_WORKER = 4
CALM_S = 300  # a pool shrinks only after the load was low for so long: a worker's KV leaves with it


def monitoring_component(deployment: Deployment) -> dict[str, str]:
    """Files of the component by name."""
    elastic = deployment.elastic_pools
    files = {"service-monitor.yaml": documents_text(_monitor(deployment))}
    if elastic:
        files["autoscaling.yaml"] = documents_text([_scaler(deployment, pool) for pool in elastic])
    component: Document = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "resources": list(files),
    }
    if elastic:
        # Who scales a pool says its size, and no later `kubectl apply`.
        component["patches"] = [
            {
                "target": {"kind": "Deployment", "name": pool.name},
                "patch": '[{"op": "remove", "path": "/spec/replicas"}]',
            }
            for pool in elastic
        ]
    return {**files, "kustomization.yaml": documents_text([component])}


def _monitor(deployment: Deployment) -> list[Document]:
    """Prometheus reads the page of every pod, by way of a service that has them all."""
    name = "metrics"
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": selector(deployment, name)},
            "spec": {
                "clusterIP": "None",
                "selector": labels(deployment),
                "ports": [
                    {
                        "name": METRICS,
                        "port": deployment.frontends.metrics_port,
                        "targetPort": METRICS,
                    }
                ],
            },
        },
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "ServiceMonitor",
            "metadata": metadata(deployment, name),
            "spec": {
                "selector": {"matchLabels": selector(deployment, name)},
                "targetLabels": [INSTANCE],
                "endpoints": [{"port": METRICS, "interval": "10s"}],
            },
        },
    ]


def _scaler(deployment: Deployment, pool: PoolSpec) -> Document:
    assert pool.elastic is not None
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(deployment, pool.name),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": pool.name},
            "minReplicas": max(1, pool.elastic.least),
            "maxReplicas": pool.elastic.most,
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {
                            "name": LIVE,
                            "selector": {"matchLabels": {SERIES_LABEL: deployment.name}},
                        },
                        "target": {"type": "AverageValue", "averageValue": str(LIVE_PER_WORKER)},
                    },
                },
                {
                    "type": "Pods",
                    "pods": {
                        "metric": {"name": WAITING},
                        "target": {"type": "AverageValue", "averageValue": str(WAITING_PER_WORKER)},
                    },
                },
            ],
            "behavior": {
                "scaleDown": {
                    "stabilizationWindowSeconds": CALM_S,
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
                }
            },
        },
    }
