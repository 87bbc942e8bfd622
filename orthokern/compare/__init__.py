"""Compare a model that uses torch.nn.RNN or torch.nn.GRU with the same model on orthokern: time, memory, results.

    python -m orthokern.compare --cell gru --input 64 --hidden 256 --batch 32 --time 200
    python -m orthokern.compare --module mypackage.models:build --batch 16 --time 100

`build` is called without arguments and returns the model, or (model, input, ...) to give the inputs of forward too.
The exit code is 0 if both agree, 1 if they disagree, 2 for bad input.
"""

from orthokern.compare.measure import compare
from orthokern.compare.result import Comparison, Errors, Times

__all__ = ["Comparison", "Errors", "Times", "compare"]
