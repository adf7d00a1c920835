"""Pairwise problems: the problem, its oracle, losses between two scores, and pooled partners."""
