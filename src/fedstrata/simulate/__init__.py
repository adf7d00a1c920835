"""Runs on one computer or cluster: `fs.run`, `fs.tune`, `fs.estimate` and `fs.profile`. Start at `run.py`."""
