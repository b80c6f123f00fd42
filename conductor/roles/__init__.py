"""Which worker should take the other role?"""
