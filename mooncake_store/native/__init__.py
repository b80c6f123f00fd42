"""What is compiled, because Python cannot do it fast?"""
