"""What allocations and their release do to the counters."""

import torch

torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
x = torch.empty(4 * 1024 * 1024, device="cuda")
y = x.view(2, -1)[1]
print(torch.cuda.memory_allocated() - before, torch.cuda.memory_reserved() >= torch.cuda.memory_allocated())
del x
print(torch.cuda.memory_allocated() - before, y.untyped_storage().nbytes())
del y
print(torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before >= 16 * 1024 * 1024)
stats = torch.cuda.memory_stats()
print("allocated_bytes.all.current" in stats, isinstance(torch.cuda.memory_summary(), str))
free, total = torch.cuda.mem_get_info()
print(0 < free <= total, torch.cuda.get_device_properties(0).total_memory > 0)
