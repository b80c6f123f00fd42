"""Which figures of Mooncake's papers come out of the simulated cluster? One module a figure."""
