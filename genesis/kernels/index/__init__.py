"""Indexing by arrays and masks, sorting, and sums of rows that share an index."""
