"""How is a measurement run? Servers, processes, rounds in turns, the printed result."""
