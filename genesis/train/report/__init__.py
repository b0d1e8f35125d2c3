"""Pages about runs: recorded curves, tables and texts in one HTML file, or served while a run continues."""
