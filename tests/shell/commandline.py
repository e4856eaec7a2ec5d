"""The command line in this process, for tests."""

import dataclasses
import io
import json
import logging
import pathlib
from typing import Any

import structlog

from mig_manager.cli import main
from mig_manager.cli.toolkit import console, parser
from mig_manager.sandbox.driver import library as simulated
from tests import contract

SPEC = ("--simulate", "2xA100-SXM4-40GB")
ONE_LAYOUT = """
version: v1
mig-configs:
  one:
  - devices: all
    mig-enabled: true
    mig-devices: {3g.20gb: 1, 1g.5gb: 4}
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    out: str
    err: str

    def __post_init__(self) -> None:
        """Hold each answer in JSON to its schema."""
        contract.check_output(self.out)

    @property
    def data(self) -> Any:
        return json.loads(self.out)


class Shell:
    """A shell whose user has a home of their own."""

    def __init__(self, home: pathlib.Path) -> None:
        """Begin with an environment that has the home and nothing else."""
        self._home = home
        self.environ = {"HOME": str(home)}

    def file(self, text: str, name: str = "layouts.yaml") -> str:
        path = self._home / name
        path.write_text(text)
        return str(path)

    def __call__(
        self, *argv: str, stdin: str = "", program: str = parser.PROGRAM, **environ: str
    ) -> Answer:
        out, err = io.StringIO(), io.StringIO()
        terminal = console.Console(
            stdin=io.StringIO(stdin), stdout=out, stderr=err, environ=self.environ | environ
        )
        status = main.main(argv, terminal, program=program)
        assert "Traceback" not in err.getvalue()
        assert "internal error" not in err.getvalue()
        return Answer(status=status, out=out.getvalue(), err=err.getvalue())


def forget() -> None:
    """Undo what a command line does to its process, which is not to last."""
    simulated.load(None)
    forget_log()


def forget_log() -> None:
    structlog.reset_defaults()
    root = logging.getLogger()
    for handler in list(root.handlers):
        if type(handler).__module__ == "mig_manager.adapters.host.log":
            root.removeHandler(handler)
