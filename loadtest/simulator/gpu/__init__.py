"""How long a GPU takes for a step: from published numbers (roofline.py) or measured (table.py)."""
