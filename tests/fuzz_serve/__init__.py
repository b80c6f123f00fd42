"""The whole system on a virtual clock, under faults, by seed: `python -m tests.fuzz_serve`.

In the way of TigerBeetle's VOPR. The product's own processes run as they are: directories with
their election, storage nodes, workers, frontends with their conductors; threads, clocks, sockets,
etcd, gRPC, NIXL and the engine are stand-ins, and one seed is one order of everything. In reading
order:

    loop.py         the virtual clock, one queue of events, the processes that faults hit
    green.py        threads, locks, queues and pools of those processes
    network.py      delays, cuts, connections that break;  sockets.py: ZeroMQ over it
    etcd.py         etcd;  calls.py: gRPC;  memory.py: segments and NIXL
    engine.py       the engine, and what every right answer is
    stage.py        which stand-in takes whose place in the product's modules
    site.py         the deployment: hosts, processes, what begins them again
    clients.py      what is asked, and the judge of each token
    users.py        processes that use the store without a worker, and the judge of their blocks
    promises.py     the judge of leases and slots;  judge.py: of everything else, and of rest
    faults.py       what befalls whom
    simulation.py   one seed from its start to rest
    defects.py      mistakes planted on purpose, each of which some seed must find

tests/README.md says what is real, what is modelled, and what that leaves out.
"""
