"""A Kustomize component for clusters with Prometheus: monitoring and autoscaling of pools.

The component needs Prometheus Operator (ServiceMonitor) and an adapter that serves Prometheus
metrics as Kubernetes metrics. A pool scales by the larger demand of two metrics: the conductor's
number of live requests, which grows before any worker is late, and the number of requests that wait
at the pool's workers.
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
SERIES_LABEL = "app_kubernetes_io_instance"  # the same label in Prometheus
LIVE_PER_WORKER = 16  # target of live requests for each worker of a pool
WAITING_PER_WORKER = 4  # target of waiting requests for each worker of a pool
CALM_S = 300  # time of low load before a pool shrinks, because a worker's KV is lost with it


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
        # The autoscaler sets the size of a pool, so `kubectl apply` must not set it.
        component["patches"] = [
            {
                "target": {"kind": "Deployment", "name": pool.name},
                "patch": '[{"op": "remove", "path": "/spec/replicas"}]',
            }
            for pool in elastic
        ]
    return {**files, "kustomization.yaml": documents_text([component])}


def _monitor(deployment: Deployment) -> list[Document]:
    """A Service with all pods, whose metrics pages Prometheus reads."""
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
