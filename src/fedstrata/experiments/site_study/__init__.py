"""Experiments on sites with patients: a seed is a division of their rows, and each site also runs alone."""
