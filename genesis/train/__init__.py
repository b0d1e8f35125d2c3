"""Training: configuration, loop, checkpoints, metrics, progress and the loss picture. It never imports models."""
