"""The `genesis` command: typer commands that parse, call and print; `session` is what they run."""
