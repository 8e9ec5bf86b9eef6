"""The one look of tables in reports."""

from rich.table import Table


def table(title: str, *columns: str, text_columns: int = 1) -> Table:
    """An empty table; all but the first ``text_columns`` columns are numbers, set to the right."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i < text_columns else "right", overflow="fold")
    return made
