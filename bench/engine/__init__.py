"""How fast is the torch engine on CPU, beside transformers and beside its own limits?"""
