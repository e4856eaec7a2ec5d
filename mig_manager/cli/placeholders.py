"""What stands for the value of an option, and what values there are to choose from.

The names are those that help, manual and shell completion know by sight: a value called FILE is
completed as one.
"""

from typing import Self


class OneOf(str):
    """A placeholder with the words to choose from, for help and completion.

    Not argparse's ``choices``: a value from a variable of the environment needs the same check,
    which ``source`` makes.
    """

    __slots__ = ("words",)

    words: tuple[str, ...]

    def __new__(cls, name: str, words: tuple[str, ...]) -> Self:
        """Return the placeholder ``name`` for one of ``words``."""
        self = super().__new__(cls, name)
        self.words = words
        return self


FILE = "FILE"
FOLDER = "FOLDER"
LAYOUT = "LAYOUT"
"""A layout of the document that the same command line names."""
PRODUCT = "PRODUCT"
"""A GPU by name."""
SPEC = "SPEC"
"""GPUs of a simulated node."""
SECONDS = "SECONDS"
NAME = "NAME"
FORMAT = "FORMAT"


def one_of(name: str, *words: str) -> OneOf:
    """Return a placeholder for one of these words."""
    return OneOf(name, words)
