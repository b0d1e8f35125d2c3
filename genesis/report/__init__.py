"""Reports about many ops: what is measured, what follows from it, what changed since, and the files of it."""
