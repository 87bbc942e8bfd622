"""`python -m orthokern.tasks` lists the tasks."""

from orthokern.commandline import say
from orthokern.tasks import descriptions

if __name__ == "__main__":
    for name, text in descriptions().items():
        say(f"python -m orthokern.tasks.{name:<20}{text}")
    say("\nEach has --help and --help-all.")
