"""How fast is it? One benchmark per module or room: `python -m bench.NAME`."""
