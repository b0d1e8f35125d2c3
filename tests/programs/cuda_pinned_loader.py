"""A loader with pinned memory, copies that do not block, and sums on the device."""

import torch
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.arange(32.0).view(16, 2), torch.arange(16))
total = torch.zeros((), device="cuda")
for x, y in DataLoader(data, batch_size=4, pin_memory=True):
    pinned = x.is_pinned()
    x, y = x.cuda(non_blocking=True), y.to("cuda", non_blocking=True)
    total += (x.sum(1) * y).sum()
print(pinned, total.item(), y.device.type)
out = torch.empty(2, pin_memory=True)
out.copy_(x[0], non_blocking=True)
torch.cuda.current_stream().synchronize()
print(out.tolist())
