"""The command line, the entry of the package. Each command imports what it needs when it runs, so that `--help` is
quick."""

from __future__ import annotations

import sys
from typing import NoReturn

from specdec.cli import benches, commands, evaluations
from specdec.cli.talk import one_line
from specdec.errors import SpecdecError

ERROR, INTERRUPTED = 2, 130  # exit codes

app = commands.app
app.add_typer(evaluations.app, name="eval")
app.add_typer(benches.app, name="bench")


def main() -> NoReturn:
    """Run the command line: what a user did wrong is one line on stderr and exit code 2, Ctrl-C exit code 130."""
    try:
        app()
    except SpecdecError as error:
        print(f"specdec: {one_line(error)}", file=sys.stderr)
        sys.exit(ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0)
