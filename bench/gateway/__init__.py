"""How much does OpenAI's interface cost on top of Triton's own?"""
