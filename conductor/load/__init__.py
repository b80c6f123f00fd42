"""How busy is each worker, now and later?"""
