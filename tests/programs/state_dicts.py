"""State dicts: strict loading, missing keys, assign, files on disk."""

import os
import tempfile

import torch
from torch import nn

net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
nn.init.constant_(net[0].weight, 0.25)
nn.init.zeros_(net[0].bias)
net(torch.arange(8.0).view(4, 2))
state = net.state_dict()
print({k: (tuple(v.shape), v.dtype) for k, v in state.items()})
print(state["1.running_mean"].tolist(), state["1.num_batches_tracked"].item())
other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
partial = {k: v for k, v in state.items() if not k.endswith("bias")}
partial["extra"] = torch.zeros(1)
result = other.load_state_dict(partial, strict=False)
print(result.missing_keys, result.unexpected_keys)
try:
    other.load_state_dict(partial)
except RuntimeError as error:
    print("refused", "extra" in str(error))
print(other.load_state_dict(state, assign=True), other[0].weight is state["0.weight"])
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "net.pt")
    torch.save(state, path)
    loaded = torch.load(path)
print(all(torch.equal(loaded[k], v) for k, v in state.items()), type(loaded["0.weight"]).__name__)
