"""Do unchanged public load generators report the same TTFT as the server?"""
