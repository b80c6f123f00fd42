"""What do other engines read to run a deployment? systemd, nftables, Compose, Kubernetes."""
