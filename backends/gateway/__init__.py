"""How do clients of OpenAI's interface speak with the conductor?"""
