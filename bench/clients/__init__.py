"""Do public load generators, unchanged, see the TTFT that the server says it has?"""
