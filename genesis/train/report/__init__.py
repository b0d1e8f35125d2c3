"""Pages about runs: what was recorded, as curves, tables and texts in one HTML file, or served while a run goes on."""
