"""`genesis serve`: the engine in one process, HTTP in another, and messages between them."""
