"""What travels between clients and server, derived from placements. Nothing here names an algorithm."""
