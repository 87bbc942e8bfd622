"""`python -m orthokern.tasks` lists the tasks."""

from orthokern.commandline import listing
from orthokern.tasks import descriptions

if __name__ == "__main__":
    lines = [f"python -m orthokern.tasks.{name:<20}{text}" for name, text in descriptions().items()]
    raise SystemExit(listing("python -m orthokern.tasks", "\n".join([*lines, "", "Each has --help and --help-all."])))
