"""Does an agent framework or an evaluation tool complete its script, unchanged?"""
