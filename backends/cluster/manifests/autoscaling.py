"""A Kustomize component for clusters with Prometheus: monitoring and autoscaling of pools.

The component needs Prometheus Operator (ServiceMonitor) and an adapter that serves Prometheus
metrics as Kubernetes metrics. A pool scales by the larger demand of two metrics. The first is the
conductor's number of live requests, which grows before any worker is late. The second is the number
of requests that wait at the pool's workers.
"""

from __future__ import annotations

from backends.cluster.deployment import Deployment, PoolSpec
from backends.cluster.manifests.pods import (
    METRICS,
    Document,
    documents_text,
    labels,
    metrics_port,
    resource,
    selector,
)

LIVE, WAITING = "mooncake_requests_live", "mooncake_requests_waiting"  # docs/metrics.md
INSTANCE = "app.kubernetes.io/instance"
SERIES_LABEL = "app_kubernetes_io_instance"  # the same label in Prometheus
LIVE_PER_WORKER = 16  # target of live requests for each worker of a pool
WAITING_PER_WORKER = 4  # target of waiting requests for each worker of a pool
CALM_S = 300  # time of low load before a pool shrinks, because a worker's KV is lost with it


def monitoring_component(deployment: Deployment) -> dict[str, str]:
    """Name -> text of each file of the component."""
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
    chosen = selector(deployment, name)
    service = {
        "clusterIP": "None",
        "selector": labels(deployment),
        "ports": metrics_port(deployment),
    }
    monitor = {
        "selector": {"matchLabels": chosen},
        "targetLabels": [INSTANCE],
        "endpoints": [{"port": METRICS, "interval": "10s"}],
    }
    found = resource(deployment, "Service", name, service)
    found["metadata"]["labels"] = chosen
    api = "monitoring.coreos.com/v1"
    return [found, resource(deployment, "ServiceMonitor", name, monitor, api)]


def _scaler(deployment: Deployment, pool: PoolSpec) -> Document:
    assert pool.elastic is not None
    live = {"name": LIVE, "selector": {"matchLabels": {SERIES_LABEL: deployment.name}}}
    of_live = {"type": "AverageValue", "averageValue": str(LIVE_PER_WORKER)}
    of_waiting = {"type": "AverageValue", "averageValue": str(WAITING_PER_WORKER)}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": pool.name},
        "minReplicas": max(1, pool.elastic.least),
        "maxReplicas": pool.elastic.most,
        "metrics": [
            {"type": "External", "external": {"metric": live, "target": of_live}},
            {"type": "Pods", "pods": {"metric": {"name": WAITING}, "target": of_waiting}},
        ],
        "behavior": {
            "scaleDown": {
                "stabilizationWindowSeconds": CALM_S,
                "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
            }
        },
    }
    return resource(deployment, "HorizontalPodAutoscaler", pool.name, spec, "autoscaling/v2")
