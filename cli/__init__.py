"""The `genesis` command: typer commands that parse, call and print. No logic lives here."""
