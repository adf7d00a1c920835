"""One round, whoever runs it: exchanges, clients, server, ledger, privacy and checkpoints. Start at `round.py`."""
