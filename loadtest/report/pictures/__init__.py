"""The pictures of a report, one file for each question. Only here is matplotlib."""
