"""A paper's table or figure from one command: `python -m orthokern.reproduce table1 --data DIR`.

An experiment (`spec.Experiment`) is a list of training runs and what the paper says of each. `runner` trains what is
not trained yet, `report` sets our numbers beside the published ones. The experiments of a paper are one module, for
example `orthokern.reproduce.vorontsov`.
"""
