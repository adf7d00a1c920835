"""The commands of the command line, one file each.

A command has a docstring (its help), `arguments(parser)`, and `execute(options)`, which returns the exit code. All of
these files are imported for `fedstrata --help`, so they import what is heavy inside functions.
"""
