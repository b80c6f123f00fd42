"""Real processes, killed and stopped at random under load: `python -m tests.chaos` (make chaos).

blocks.py   what each key's block must be, so that any process can tell right bytes from wrong
client.py   a process that puts, gets, moves and removes blocks, and writes down what it saw
site.py     directory, storage nodes and clients as processes, each in its own process group
monkey.py   what is killed, stopped and started again, when
verdict.py  what must be true when the monkey has gone
losses.py   what is known of blocks that could not be read then
"""
