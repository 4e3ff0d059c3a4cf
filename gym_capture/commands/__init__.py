"""The subcommands of `gym-capture`, one module each.

Invariant: a module here is imported only when its command is the one that runs, so no command pays for another's
imports, and `gym-capture --help` pays for none.

A module offers a typer-annotated function `command`, or, for a group of commands, a `typer.Typer` named `app`. It is
listed with its one-line summary in `gym_capture.cli.COMMANDS`. Commands raise `GymCaptureError` for what a person can
put right; `cli.main` prints it as one line.
"""
