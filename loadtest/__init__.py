"""Load tests: replay of traces, benchmarks, and the meaning of their numbers (see README.md).

Nothing here is needed to serve. The package may import the deciding parts (`conductor`, the pure
files of `mooncake_store`), but it reaches a running server only as a user does: over gRPC.
"""
