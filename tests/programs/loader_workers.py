"""Workers of a map dataset and an iterable dataset."""

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, 12, step))


def main():
    data = TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12))
    for workers in (0, 2):
        loader = DataLoader(data, batch_size=4, num_workers=workers, persistent_workers=False)
        print([(x.sum().item(), y.tolist()) for x, y in loader])
        print(sorted(int(i) for batch in DataLoader(Stream(), batch_size=3, num_workers=workers) for i in batch))


main()
