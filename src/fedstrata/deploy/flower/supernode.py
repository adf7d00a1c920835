"""Flower's SuperNode with shorter waits; it reconnects after a crash. `patches` has the details."""

import sys

from fedstrata.deploy.flower import patches


def main() -> None:
    """Run the SuperNode with the arguments of this process."""
    from flwr.supernode.cli import flower_supernode

    patches.short_sleeps("flwr.supernode.start_client_internal")
    patches.short_pulls()
    patches.short_heartbeats()
    patches.persistent_activation()
    sys.argv[0] = "flower-supernode"
    flower_supernode()


if __name__ == "__main__":
    main()
