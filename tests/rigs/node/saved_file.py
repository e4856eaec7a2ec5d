"""The port of a text that the host keeps, in memory."""

from collections.abc import Callable

from mig_manager import errors


class FakeSavedFile:
    """A journal, a layout for the next boot or a request; each operation can be refused."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.aside: str | None = None
        self.saved: list[str] = []
        """The last ones, in order: some tests play thousands of runs, and measure what they
        leave."""
        self.failing_operations: set[str] = set()
        self.on_save: Callable[[], object] = lambda: None

    def _act(self, name: str) -> None:
        if name in self.failing_operations:
            raise errors.ConfigError(f"cannot {name} the journal")

    def read(self) -> str | None:
        self._act("read")
        return self.text

    def save(self, text: str) -> None:
        self._act("write")
        self.on_save()
        self.text = text
        self.saved = [*self.saved[-9:], text]

    def clear(self) -> None:
        self._act("clear")
        self.text = None

    def set_aside(self) -> str:
        self._act("set_aside")
        self.aside, self.text = self.text, None
        self.failing_operations.discard("read")
        return "journal.unreadable"
