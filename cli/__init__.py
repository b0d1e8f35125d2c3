"""The `genesis` command: typer commands parse, call and print; `session` implements them."""
