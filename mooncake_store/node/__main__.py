"""`python -m mooncake_store.node`: a storage node as a process (node_main.py)."""

from mooncake_store.node.node_main import main

main()
