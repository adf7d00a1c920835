"""Log lines that others can cause: so many in a minute, and no more. Nobody can fill the log."""

import logging
import math
import time

MOST, SECONDS = 20, 60.0  # lines, and the time in which they are written at most


class FewLines:
    """Writes lines to a log; beyond a number of them in a minute, they are only counted."""

    def __init__(self, log: logging.Logger):
        """Nothing is written yet.

        Args:
            log: where to.
        """
        self.log, self.since, self.count = log, -math.inf, 0

    def write(self, level: int, line: str) -> None:
        """Write a line, or count it.

        Args:
            level: of the logging module.
            line: printable text.
        """
        if time.monotonic() - self.since > SECONDS:
            if self.count > MOST:
                self.log.warning("%d more lines of this kind", self.count - MOST)
            self.since, self.count = time.monotonic(), 0
        self.count += 1
        if self.count <= MOST:
            self.log.log(level, "%s", line)
        elif self.count == MOST + 1:
            self.log.warning("many lines of this kind; for a minute they are only counted")
