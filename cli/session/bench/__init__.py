"""How long a training step of a model takes, by phase, and what memory it takes: what `genesis bench-model` shows."""
