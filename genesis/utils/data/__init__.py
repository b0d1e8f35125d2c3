"""Data sets, samplers and the loader that makes batches of them, as in torch.utils.data.

Examples pass between worker processes by pickle over private pipes; nothing on disk is unpickled.

>>> from genesis.utils.data import DataLoader, TensorDataset
>>> data = TensorDataset(genesis.arange(4.0), genesis.arange(4))
>>> [y.tolist() for x, y in DataLoader(data, batch_size=2)]
[[0, 1], [2, 3]]
"""

from genesis.keywords import check_calls
from genesis.utils.data.collate import default_collate, default_convert
from genesis.utils.data.dataloader import DataLoader
from genesis.utils.data.dataset import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)
from genesis.utils.data.distributed import DistributedSampler
from genesis.utils.data.sampler import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from genesis.utils.data.worker import get_worker_info

__all__ = [
    "BatchSampler",
    "ChainDataset",
    "ConcatDataset",
    "DataLoader",
    "Dataset",
    "DistributedSampler",
    "IterableDataset",
    "RandomSampler",
    "Sampler",
    "SequentialSampler",
    "StackDataset",
    "Subset",
    "SubsetRandomSampler",
    "TensorDataset",
    "WeightedRandomSampler",
    "default_collate",
    "default_convert",
    "get_worker_info",
    "random_split",
]

check_calls(globals(), ("DataLoader", "default_collate", "default_convert", "get_worker_info", "random_split"))
