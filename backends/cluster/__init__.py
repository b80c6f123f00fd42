"""Deployments of several hosts: the cluster file, the plan of each host, the commands."""
