"""Modules with the interfaces of torch.nn.RNN, GRU and LSTM, activations, and a readout with its loss.

Letters in all of them: B batch, T time, N hidden_size, D input_size (features, or the number of token ids), K rank of
U and V, P rows of a packed batch.
"""

from orthokern.nn import frozen as frozen  # defines what `frozen` of the modules returns
from orthokern.nn.activations import OPLU, ModReLU
from orthokern.nn.episodes import EpisodeRNN
from orthokern.nn.exprnn import ExpRNN
from orthokern.nn.factorized import FactorizedRNN
from orthokern.nn.gru import GRU
from orthokern.nn.linear_cross_entropy import LinearCrossEntropy
from orthokern.nn.lstm import LSTM, PeepholeLSTM
from orthokern.nn.nonnormal import NonNormalRNN
from orthokern.nn.rnn import RNN
from orthokern.nn.rotation import RotationRNN

__all__ = [
    "GRU",
    "LSTM",
    "OPLU",
    "RNN",
    "EpisodeRNN",
    "ExpRNN",
    "FactorizedRNN",
    "LinearCrossEntropy",
    "ModReLU",
    "NonNormalRNN",
    "PeepholeLSTM",
    "RotationRNN",
]
