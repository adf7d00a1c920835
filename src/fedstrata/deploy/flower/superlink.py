"""Flower's SuperLink, whose log has no text of a site as it was sent, and whose files are for their owner alone."""

import os
import sys

from fedstrata.deploy.flower import patches


def main() -> None:
    """Run the SuperLink with the arguments of this process."""
    os.umask(0o077)
    from flwr.superlink.cli import flower_superlink

    patches.plain_logs()
    sys.argv[0] = "flower-superlink"
    flower_superlink()


if __name__ == "__main__":
    main()
