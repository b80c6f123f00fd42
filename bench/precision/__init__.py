"""How far is bfloat16 in the torch engine from float32, beside transformers?"""
