"""Small solvers that compile: Newton, linear programs, operations on gathered rows."""
