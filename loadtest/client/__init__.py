"""How is a server reached, and what does it report? Requests, answers, its description, its
page.
"""
