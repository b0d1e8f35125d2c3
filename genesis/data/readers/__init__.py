"""Readers: what one file holds, as a text or as rows: its line (of a Parquet file its row) and its value, or a defect.

A reader knows a file format and its limits, not what the values mean: that is `genesis.data.record_formats`.
"""
