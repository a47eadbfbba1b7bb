"""What records say of the machine, for tests of their reports."""

ENVIRONMENT = {
    "cpu": "a processor",
    "threads": 1,
    "torch": "2",
    "transformers": "5",
    "date": "2026-01-02T03",
    "commit": None,
}
