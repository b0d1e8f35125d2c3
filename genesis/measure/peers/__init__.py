"""Scripts that a peer's interpreter runs, in a process of its own: they import nothing of Genesis, and Genesis never
imports the peer. `child.py` is what is started; `genesis.measure.peer` starts it and asks it.
"""
