"""What an algorithm is written in: vectors, placements, the interface, hyper-parameters, levels and memory."""
