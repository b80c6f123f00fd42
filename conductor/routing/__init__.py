"""Choice of the prefill and the decode worker of a request."""
