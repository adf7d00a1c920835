"""Reports of runs: histories, tables, plots, a progress bar and loggers."""

from fedstrata.report.history import WALL_CLOCK as WALL_CLOCK
from fedstrata.report.history import History as History
from fedstrata.report.logger import JsonLines as JsonLines
from fedstrata.report.plots import plot as plot
from fedstrata.report.progress import Progress as Progress
from fedstrata.report.tables import Comparison as Comparison
from fedstrata.report.tables import compare as compare
