"""Which phases did one request go through, and which collector gets them?"""
