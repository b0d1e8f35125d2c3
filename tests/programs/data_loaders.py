"""Datasets, samplers and batches."""

import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, SequentialSampler, Subset, TensorDataset


class Squares(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"x": torch.tensor([i, i * i], dtype=torch.float32), "label": i % 3, "name": f"s{i}"}


for batch in DataLoader(Squares(7), batch_size=3, drop_last=False):
    print(batch["x"].sum().item(), batch["label"].tolist(), batch["name"], batch["label"].dtype)
pairs = TensorDataset(torch.arange(10), torch.arange(10.0) / 2)
print([[b.shape[0] for b in batch] for batch in DataLoader(pairs, batch_size=4, drop_last=True)])
both = ConcatDataset([pairs, Subset(pairs, [1, 3, 5])])
print(len(both), both[11], both[-1][1].item())
sampler = BatchSampler(SequentialSampler(pairs), batch_size=4, drop_last=False)
print([b[0].tolist() for b in DataLoader(pairs, batch_sampler=sampler)], len(sampler))
shuffled = DataLoader(pairs, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(0))
print(sorted(i for ids, _ in shuffled for i in ids.tolist()), len(shuffled))
collated = DataLoader(Squares(4), batch_size=2, collate_fn=lambda items: sum(int(i["x"][1]) for i in items))
print(list(collated))
