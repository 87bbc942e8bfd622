"""Experiments, one module each, run as `python -m orthokern.tasks.<task>`."""
