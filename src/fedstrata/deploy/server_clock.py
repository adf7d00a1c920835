"""The server's time at a site. A wrong clock of the site must not look like a wrong key."""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

CLOSE = 3.0  # seconds by which a site's clock may differ from the server's without being corrected
LARGEST = 39600.0  # seconds by which it is corrected at most: Flower drops replies from a clock twelve hours ahead

log = logging.getLogger("fedstrata")


class ServerClock:
    """The server's time, which a site signs: Flower refuses signatures from 5 s ahead or 305 s behind its clock.

    The time comes from the Date header of the server's responses, whose certificate was verified. It has whole seconds
    and may be old by some more, so that the estimate is never ahead of the server's clock.
    """

    def __init__(self, time: Callable[[], float] = time.time):
        """A clock that has not heard of the server yet.

        Args:
            time: this machine's clock, in seconds since 1970.
        """
        self.time, self.seen, self.offset = time, 0.0, 0.0  # offsets: as seen last, and as used
        self.received = self.warned = False

    def now(self) -> datetime:
        """The time to sign."""
        return datetime.fromtimestamp(self.time() + self.offset, UTC)

    def learn(self, date: str | None, waited: float = 0.0) -> bool:
        """Take the time of a response; returns whether the time to sign has moved.

        Args:
            date: its Date header, if it has one.
            waited: seconds between request and response, by which the date may be old.
        """
        try:
            server = parsedate_to_datetime(date or "").timestamp()
        except (TypeError, ValueError):
            return False
        self.received, self.seen, before = True, server - self.time(), self.offset
        small, large = -CLOSE - waited <= self.seen <= CLOSE, abs(self.seen) > LARGEST
        self.offset = 0.0 if small or large else self.seen
        if not small and not self.warned:
            self.warned = True
            note = "too much to be corrected" if large else "signatures use the server's time"
            log.warning("this machine's clock is %s; %s. Set it, e.g. with NTP", self.told(), note)
        return abs(self.offset - before) > CLOSE

    def told(self) -> str:
        """The offset in words."""
        return f"{abs(self.seen):.0f} s {'behind' if self.seen > 0 else 'ahead of'} the server's"


def why_rejected(status: int, clock: ServerClock | None) -> str:
    """What a rejection means. Flower sends 401 for a wrong signature or time, and 412 for an unknown key.

    Args:
        status: of the response.
        clock: that of the signature.
    """
    if clock is not None and abs(clock.seen) > LARGEST:
        return f"its clock is {clock.told()}, which is too much to be corrected: set it"
    if status != 401:
        return "is its key registered (`fedstrata deploy register`)? Or does another SuperNode use the same key?"
    known = "" if clock is None or clock.received else "; it did not send its time, so that the clock may be wrong, too"
    return f"its signature is refused, and its clock is not the reason: is this the right private key?{known}"
