"""An error for sizes that are not possible. It proposes other sizes."""

from collections.abc import Callable


class SizeError(ValueError):
    """A size is not possible; the message proposes sizes that are.

    The message writes a proposal as a keyword argument of Python, such as ``heads=8``. Another
    interface, such as a command line, writes it in its own notation with `spelled`.

    Attributes:
      template: the message, with ``{}`` for each proposal.
      proposals: the proposals in this order: the name of an axis, and a size or a named grouping.

    Example:
      >>> error = SizeError("heads: 7 is odd; {} is even", ("heads", 8))
      >>> print(error)
      heads: 7 is odd; heads=8 is even
      >>> error.spelled(lambda axis, value: f"--{axis} {value}")
      'heads: 7 is odd; --heads 8 is even'
    """

    def __init__(self, template: str, *proposals: tuple[str, int | str]):
        self.template = template
        self.proposals = proposals
        super().__init__(
            self.spelled(
                lambda axis, value: (
                    f'{axis}="{value}"' if isinstance(value, str) else f"{axis}={value}"
                )
            )
        )

    def __reduce__(self) -> tuple[object, ...]:
        return SizeError, (self.template, *self.proposals)

    def spelled(self, spell: Callable[[str, int | str], str]) -> str:
        """The message with each proposal written by ``spell(axis, value)``."""
        return self.template.format(*(spell(axis, value) for axis, value in self.proposals))
