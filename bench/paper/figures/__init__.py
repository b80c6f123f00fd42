"""Which figures of Mooncake's papers does the simulated cluster reproduce? One module a figure."""
