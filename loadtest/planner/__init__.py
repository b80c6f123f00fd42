"""Which fleet serves this traffic best, and how is it configured?"""
