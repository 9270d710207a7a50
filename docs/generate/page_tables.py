"""The frame of a page's tables: comments, between which a program writes a table again.

::

    <!-- KIND: NAME -->     KIND is the program's, NAME one of its tables
    | … | … |
    <!-- end -->
"""

import re
from pathlib import Path

TOP = Path(__file__).parents[2]


class PageTables:
    """The tables of one kind on some pages.

    Args:
        kind: the word in the comments.
        pages: paths from the top of the repository.
        table_of: a function from a name to the table, or the sentence, of this name as Markdown.
    """

    def __init__(self, kind, pages, table_of):
        self.pages = pages
        self.frame = re.compile(rf"(<!-- {kind}: ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)
        self._table_of = table_of

    def in_text(self, text):
        """Return a page's text with each table as it is today."""

        def filled(frame):
            begin, name, end = frame.groups()
            return f"{begin}\n{self._table_of(name)}\n\n{end}"

        return self.frame.sub(filled, text)

    def write(self):
        """Write the tables into the pages, and print which pages these are."""
        for page in self.pages:
            path = TOP / page
            path.write_text(self.in_text(path.read_text(encoding="utf-8")), encoding="utf-8")
            print(page)


def markdown(rows):
    """Return rows, of which the first is the header, as a Markdown table."""
    head, *others = [[cell.replace("|", "&#124;") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *others]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
