"""Replies from Flower's grid, such that a reply which Flower itself cannot read loses no other one."""

from collections.abc import Iterator
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid


def pulled(grid: Grid, pending: dict[str, Any]) -> Iterator[tuple[Any, FlowerMessage | str]]:
    """The replies that are there, with what their call was noted under; in place of an unreadable one, the reason.

    Args:
        grid: Flower's grid.
        pending: by message, a note about the call; calls with a reply are removed.
    """
    try:
        replies = list(grid.pull_messages(list(pending))) if pending else []
    except Exception:  # Flower reads all replies in one go, and one of them is not what it expects
        yield from _one_by_one(grid, pending)
        return
    for reply in replies:
        yield from _noted(reply, pending)


def _one_by_one(grid: Grid, pending: dict[str, Any]) -> Iterator[tuple[Any, FlowerMessage | str]]:
    """Replies that the failed attempt has consumed are missing here: their calls are sent again when due."""
    for message in list(pending):
        try:
            replies = list(grid.pull_messages([message]))
        except Exception as error:
            yield pending.pop(message), f"Flower cannot read its reply ({type(error).__name__}: {error})"
            continue
        for reply in replies:
            yield from _noted(reply, pending)


def _noted(reply: FlowerMessage, pending: dict[str, Any]) -> Iterator[tuple[Any, FlowerMessage]]:
    message = reply.metadata.reply_to_message_id
    if message in pending:
        yield pending.pop(message), reply
