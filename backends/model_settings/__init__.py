"""What do the models' config.pbtxt say, is it right, and how is it changed while they serve?"""
