"""Scripts that a peer's interpreter runs, in a process of its own. They import nothing of Genesis, and Genesis never
imports the peer. `genesis.measure.peer` starts `torch_ops.py` and asks it.
"""
