"""Exact measures of scores (`ranking`) and of decisions (`fairness`); they need no federation."""

from fedstrata.metrics.ranking import (
    auc,
    auc_by_client,
    average_precision,
    local_auc_mean,
    partial_auc,
    two_way_partial_auc,
)

__all__ = ["auc", "auc_by_client", "average_precision", "local_auc_mean", "partial_auc", "two_way_partial_auc"]
