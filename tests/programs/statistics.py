"""Descriptive statistics of a table."""

import numpy as np
import torch

rng = np.random.default_rng(25)
x = torch.from_numpy(rng.standard_normal((50, 4)))
print(torch.quantile(x, torch.tensor([0.1, 0.5, 0.9], dtype=x.dtype), dim=0).flatten().tolist())
print(x.median(dim=0).values.tolist(), x.kthvalue(5, dim=0).values.tolist(), torch.std_mean(x, dim=0)[0].tolist())
counts = torch.histc(x[:, 0], bins=5, min=-2, max=2)
ids = torch.bucketize(x[:, 1], torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype))
print(counts.tolist(), torch.bincount(ids, minlength=4).tolist(), ids.mode().values.item())
print(torch.cov(x.T).diagonal().tolist(), torch.corrcoef(x.T)[0].tolist())
values, inverse, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
print(values.tolist(), sizes.tolist(), torch.equal(values[inverse], ids))
holes = x.clone()
holes[holes > 1.5] = float("nan")
print(torch.nanmean(holes).item(), torch.nansum(holes, dim=0).tolist(), torch.isnan(holes).sum().item())
print(torch.cummax(x[:6, 2], 0).values.tolist(), torch.cumprod(x[:4, 3], 0).tolist(), torch.diff(x[:4, 0]).tolist())
print(
    torch.aminmax(x).max.item(), torch.searchsorted(x[:, 0].sort().values, 0.0).item(), torch.trapezoid(x[:, 0]).item()
)
print(
    torch.nan_to_num(holes, nan=-1.0).min().item(), x.argsort(dim=0)[0].tolist(), x.var(dim=1, correction=0)[0].item()
)
