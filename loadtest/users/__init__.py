"""Load with users, under Locust: who they are, what they send, and what came of it.

`locustfile.py` beside this package is the entry. Importing the package itself patches nothing; the
files that need gevent say so, and the rest (settings, texts, workloads, verdict) is pure.
"""
