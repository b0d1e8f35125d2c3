"""Reads and writes by index, mask, slice and scatter."""

import torch

x = torch.arange(24).view(2, 3, 4)
print(x[..., -1].tolist(), x[:, [0, 2], 1].tolist(), x[1, :, None, ::2].shape, x[x % 5 == 0].tolist())
rows, columns = torch.tensor([[0], [1]]), torch.tensor([2, 0])
print(x[rows, columns].shape, x[rows, columns, 3].tolist(), x[torch.tensor(1)].sum().item())
y = x.clone().float()
y[:, 1] = torch.tensor([9.0, 8.0, 7.0, 6.0])
y[0, 0, 1:3] += 0.5
y[y > 20] *= -1
print(y.tolist())
print(
    torch.zeros(3, 4)
    .scatter_reduce(0, torch.tensor([[0, 1, 2, 0], [0, 0, 2, 1]]), y[0, :2], "amax", include_self=False)
    .tolist()
)
print(torch.zeros(4).index_add(0, torch.tensor([0, 3, 0]), torch.tensor([1.0, 2.0, 3.0]), alpha=2).tolist())
print(
    torch.zeros(2, 3)
    .index_put((torch.tensor([0, 0]), torch.tensor([1, 1])), torch.tensor([1.0, 2.0]), accumulate=True)
    .tolist()
)
print([t.tolist() for t in torch.where(x[0] > 8)], torch.nonzero(x[0] > 9).tolist(), torch.argwhere(x[0] == 0).tolist())
print(
    torch.take(x, torch.tensor([0, -1, 7])).tolist(),
    x.masked_select(x > 21).tolist(),
    torch.isin(x[0, 0], torch.tensor([1, 3])).tolist(),
)
print(
    torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")).tolist(),
    torch.tril_indices(3, 3).tolist(),
)
print(
    torch.cartesian_prod(torch.tensor([1, 2]), torch.tensor([3, 4])).tolist(),
    torch.block_diag(torch.ones(1, 2), torch.ones(2, 1)).tolist(),
)
