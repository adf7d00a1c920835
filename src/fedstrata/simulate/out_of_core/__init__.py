"""Runs whose data and `Local` fields stay on the host (`stream=True`)."""
