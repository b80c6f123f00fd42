"""A cluster file of three hosts that uses every section, for tests to change."""

from __future__ import annotations

THREE_HOSTS = """\
name: demo
hosts:
  a: {address: 10.77.0.1}
  b: {address: 10.77.0.2, environment: {UCX_TLS: tcp, UCX_NET_DEVICES: e0}}
  c: {address: 10.77.0.3, identity: c, state_dir: .mooncake-c, rack: r2}
etcd: {hosts: [a, b, c], client_port: 2379, peer_port: 2380}
directories: {hosts: [a, b], port: 7001, events_port: 7002, ttl_s: 3}
storage_nodes:
  a0: {host: a, dram: 256M}
  a1: {host: a, dram: 1G, ssd: 2G, ssd_path: disk}
  b0: {host: b, dram: 256M}
  c0: {host: c, dram: 256M}
frontends: {hosts: [a, b], address: 0.0.0.0}
pools:
  prefill: {role: prefill, threads: 2, workers: {a: 3, b: 1}, grpc_port: 7100}
  decode: {role: decode, slots: 16, workers: {b: 1, c: [{threads: 1}, {threads: 3}]}}
defaults: {checkpoint: demo, dtype: float32}
conductor: {admission: reserved}
slo: {ttft_s: 20, tbt_s: 0.1}
keys: {folder: keys}
trusted_data_network: [e0]
"""

ONE_HOST = """\
name: small
hosts:
  here: {address: 127.0.0.1}
storage_nodes:
  s0: {host: here, dram: 64M}
pools:
  prefill: {workers: {here: 1}}
  decode: {workers: {here: 1}}
"""
