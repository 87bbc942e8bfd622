"""Modules: recurrences that stand in for torch.nn.RNN, activations, and a readout with its loss."""

from orthokern.nn.activations import OPLU, ModReLU
from orthokern.nn.linear_cross_entropy import LinearCrossEntropy
from orthokern.nn.rnn import RNN, FactorizedRNN

__all__ = ["OPLU", "RNN", "FactorizedRNN", "LinearCrossEntropy", "ModReLU"]
