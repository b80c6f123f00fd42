"""Manifests that run a deployment with systemd, nftables, Compose and Kubernetes."""
