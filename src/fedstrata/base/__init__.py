"""Basics without a federated term: errors, files, random numbers, clocks, checks of arguments."""
