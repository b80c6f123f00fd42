"""Why did a request go where it did, and what came of that?"""
