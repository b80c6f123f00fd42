"""How fast are the prefix index, block keys and decisions, beside NVIDIA Dynamo's index?"""
