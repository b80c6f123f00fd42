"""The settings in the models' config.pbtxt files: checks, differences, live changes."""
