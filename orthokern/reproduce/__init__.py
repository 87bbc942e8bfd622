"""Reproduces tables and figures of papers, each with one command: `python -m orthokern.reproduce table1 --data DIR`.

specs/*.toml holds the experiments (`spec.Experiment`): training runs with the published numbers. `runner` trains the
runs that are not done yet, each in its own process; `report` writes a table of our numbers and the published ones.
"""
