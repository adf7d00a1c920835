"""The same round over real sites: server, sites and messages. `flower/` carries them. Start at `server.py`."""
