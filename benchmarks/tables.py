"""Tables in Markdown, and where their figures were seen."""


def table_head(*cells: str) -> list[str]:
    return [table_row(*cells), table_row("---", *["---:"] * (len(cells) - 1))]


def table_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def quoted(name: str) -> str:
    """The name of a run, such as "eagle3, copies", with its method as code."""
    method, comma, rest = name.partition(",")
    return f"`{method}`{comma}{rest}"


def where(record: dict) -> str:
    commit = f", commit {record['commit']}" if record["commit"] else ""
    return (
        f"{record['cpu']}, {threads(record)}, torch {record['torch']}, transformers"
        f" {record['transformers']}, {record['date'][:10]}{commit}."
    )


def threads(record: dict) -> str:
    return f"{record['threads']} thread{'' if record['threads'] == 1 else 's'}"
