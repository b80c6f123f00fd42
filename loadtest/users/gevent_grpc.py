"""Makes gRPC wait with gevent; to be imported before anything that imports grpc or tritonclient.

Locust replaces Python's blocking calls by gevent's, gRPC's are in C and stay: without this call a
stream that waits for a token stops every other user, and 20 of them wait for each other for ever.
"""

import locust  # noqa: F401  replaces the blocking calls, which must come first
from grpc.experimental import gevent

gevent.init_gevent()
