"""Writes the tables of the site that are made from data: ``python docs/tables.py``."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from train.analysis.evidence import summary

PAGE = Path(__file__).parent / "results" / "index.md"
PLACE = re.compile(
    r"(?<=<!-- The table is written by `python docs/tables.py`)(.*?-->\n\n).*?(?=\n\n)", re.DOTALL
)


def written(text: str) -> str:
    """The page with the table of today."""
    return PLACE.sub(lambda found: found[1] + summary("docs/results"), text, count=1)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
