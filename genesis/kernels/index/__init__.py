"""Indexing by arrays and masks, sorting, and sums of rows with equal indices."""
