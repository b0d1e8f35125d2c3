"""Unroll cells by hand."""

import numpy as np
import torch
import torch.nn as nn

rng = np.random.default_rng(3)
x = torch.from_numpy(rng.standard_normal((6, 3, 4))).float()
for cell in (nn.RNNCell(4, 5, nonlinearity="relu"), nn.GRUCell(4, 5), nn.LSTMCell(4, 5)):
    for p in cell.parameters():
        nn.init.constant_(p, 0.1)
    h = None
    for t in range(x.size(0)):
        h = cell(x[t], h)
    h = h[0] if isinstance(h, tuple) else h
    h.sum().backward()
    print(type(cell).__name__, h.shape, h.mean().item(), cell.weight_hh.grad.sum().item())
