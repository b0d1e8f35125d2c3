"""Copy the next batch from pinned memory on a side stream."""

import torch


class Prefetcher:
    def __init__(self, batches):
        self.batches, self.stream = iter(batches), torch.cuda.Stream()
        self.preload()

    def preload(self):
        try:
            host = next(self.batches)
        except StopIteration:
            self.next = None
            return
        with torch.cuda.stream(self.stream):
            self.next = host.to("cuda", non_blocking=True)

    def __iter__(self):
        while self.next is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            batch = self.next
            batch.record_stream(torch.cuda.current_stream())
            self.preload()
            yield batch


batches = [torch.full((64, 64), float(i)).pin_memory() for i in range(4)]
print(all(b.is_pinned() for b in batches), [b.sum().item() for b in Prefetcher(batches)])
