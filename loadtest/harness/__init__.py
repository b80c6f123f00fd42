"""How is a measurement run? Servers, processes, rounds in turns, the result that is printed."""
