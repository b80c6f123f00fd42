"""The pictures of a report, a file for each question that they answer. Only here is matplotlib."""
