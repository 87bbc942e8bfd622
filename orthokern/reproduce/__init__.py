"""Reproduces tables and figures of papers, each with one command: `python -m orthokern.reproduce table1 --data DIR`.

An experiment (`spec.Experiment`) is a list of training runs with the published numbers. `runner` trains the runs that
are not done yet, `report` writes a table of our numbers and the published ones. There is one module of experiments per
paper, for example `orthokern.reproduce.vorontsov`.
"""
