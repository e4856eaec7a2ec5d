"""Text that others wrote, made harmless before it is shown or logged."""


def printable(text: str, instead: str = "?") -> str:
    """Replace what a terminal would act on: whoever chose the text must not drive it."""
    return "".join(letter if letter.isprintable() else instead for letter in text)
