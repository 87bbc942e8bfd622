"""Optimizers: geodesic descent for orthonormal bases, and one optimizer object for all parameters of a model."""

from orthokern.optim.geodesic import GeodesicRMSprop, GeodesicSGD
from orthokern.optim.groups import CombinedOptimizer, optimizer_for, split_parameters

__all__ = ["CombinedOptimizer", "GeodesicRMSprop", "GeodesicSGD", "optimizer_for", "split_parameters"]
