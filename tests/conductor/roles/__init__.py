"""When workers had better take the other role."""
