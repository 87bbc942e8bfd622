"""`python -m orthokern` lists the command lines of the package."""

from orthokern.commandline import listing

COMMANDS = """\
python -m orthokern.tasks         list the training tasks
python -m orthokern.tasks.TASK    train a network on a task
python -m orthokern.reproduce     experiments of the papers
python -m orthokern.diagnostics   plots and tables of run folders
python -m orthokern.explain       the backend of a call, and why

Each has --help. Documentation: docs/README.md"""

if __name__ == "__main__":
    raise SystemExit(listing("python -m orthokern", COMMANDS))
