"""k-means and nearest neighbours with cdist."""

import numpy as np
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
rng = np.random.default_rng(26)
points = torch.from_numpy(np.concatenate([rng.normal(c, 0.3, (20, 2)) for c in (-2, 0, 2)])).float().to(device)
centres = points[[0, 25, 45]].clone()
for _ in range(5):
    distance = torch.cdist(points, centres)
    label = distance.argmin(dim=1)
    total = torch.zeros_like(centres).index_add_(0, label, points)
    count = torch.zeros(3, device=device).scatter_add_(0, label, torch.ones(60, device=device))
    centres = total / count.clamp(min=1).unsqueeze(1)
print(label.bincount().tolist(), centres.flatten().tolist())
near, index = torch.cdist(points[:5], points, p=1.0).topk(3, largest=False)
print(index[:, 1:].tolist(), near.sum().item(), torch.dist(points[0], points[1]).item())
