"""The server: the engine behind OpenAI's HTTP interface, its page, and a chat in the terminal."""
