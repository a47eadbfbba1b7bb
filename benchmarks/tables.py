"""Tables in Markdown."""


def table_head(*cells: str) -> list[str]:
    return [table_row(*cells), table_row("---", *["---:"] * (len(cells) - 1))]


def table_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
