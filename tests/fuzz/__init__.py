"""The randomized test of the store's pure core: one walk in which everything happens.

`python -m tests.fuzz` (make fuzz) walks many seeds; tests/mooncake_store/test_fuzz.py walks a few
and shows that planted defects are caught. In reading order:

    memory.py     what really lies in the DRAM and on the SSD of a node, unit by unit
    promises.py   what the directory has promised to whom: the oracle
    world.py      directory, nodes, jobs and clock of one walk
    jobs.py       writers and readers that take several steps, so that anything may come between
    requests.py   steps of clients: allocate, look up, read, copy, restore, release
    admin.py     steps of nodes: spill, crash, restart, say what they hold; a new directory
    orders.py     steps of operators: pins, quotas, draining, removing; and time
    walk.py       which step is next, and what is compared after each
"""
