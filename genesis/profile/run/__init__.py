"""What the steps of a training run spend their time and memory on: by op, module and phase, on the host and on the GPU.

`measure.py` takes the steps and records, `tables.py` adds up, `schema.py` is the report as data; the others draw it.
"""
