"""The pictures of a report, one file for each question that they answer. Only here is
matplotlib.
"""
