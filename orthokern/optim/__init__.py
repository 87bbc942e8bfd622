"""Optimizers: geodesic descent for orthonormal bases, one object for all parameters of a model, spectral bounds."""

from orthokern.optim.geodesic import GeodesicRMSprop, GeodesicSGD
from orthokern.optim.groups import CombinedOptimizer, optimizer_for, split_parameters
from orthokern.optim.projection import SpectralNormProjection

__all__ = [
    "CombinedOptimizer",
    "GeodesicRMSprop",
    "GeodesicSGD",
    "SpectralNormProjection",
    "optimizer_for",
    "split_parameters",
]
