"""A program with torch.distributed's functions, as a rank of a job or alone; prints what each function gave."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import genesis as torch
import genesis.distributed as dist

device = sys.argv[1]
where: Any = {}
if len(sys.argv) > 2:
    where = {"init_method": sys.argv[2], "world_size": int(sys.argv[3]), "rank": int(os.environ.pop("MY_RANK"))}
dist.init_process_group("gloo", timeout=timedelta(seconds=30), **where)
rank, size = dist.get_rank(), dist.get_world_size(dist.group.WORLD)
last = size - 1
found: dict[str, Any] = {"rank": rank, "size": size, "backend": dist.get_backend(), "is": dist.is_initialized()}


def of_rank(values: list[float], dtype: Any = torch.float32) -> torch.Tensor:
    """Values plus 10 times the rank."""
    return (torch.tensor(values, device=device) + 10 * rank).to(dtype)


for op in dist.ReduceOp:
    if op is not dist.ReduceOp.AVG:
        x = of_rank([1, 2], torch.int64)
        dist.all_reduce(x, op)
        found[op.name] = x.tolist()
x = of_rank([[1, 2], [3, 4]], torch.bfloat16).T  # not contiguous
assert dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True).wait()
found["AVG"] = x.tolist()
x = of_rank([0, 1]) == 0
dist.all_reduce(x)
found["any"] = x.tolist()
parameter = torch.nn.Parameter(of_rank([1.5]))
dist.broadcast(parameter, src=last)
found["broadcast"] = parameter.tolist()
x = of_rank([1, 2])
dist.reduce(x, dst=last)
found["reduce"] = x.tolist()
parts = [torch.empty(2, 1, device=device) for _ in range(size)]
dist.all_gather(parts, of_rank([[1], [2]]))
found["all_gather"] = [part.tolist() for part in parts]
whole = torch.empty(2 * size, device=device, dtype=torch.bool)
dist.all_gather_into_tensor(whole, of_rank([0, 1]) == 0)
found["all_gather_into_tensor"] = whole.tolist()
parts = [torch.empty(1, device=device) for _ in range(size)] if rank == last else None
dist.gather(of_rank([5]), parts, dst=last)
found["gather"] = parts and [part.item() for part in parts]
x = torch.empty(2, device=device)
dist.scatter(x, [of_rank([i, -i]) for i in range(size)] if rank == last else None, src=last)
found["scatter"] = x.tolist()
for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
    x = torch.empty(1, 2, device=device)
    dist.reduce_scatter_tensor(x, of_rank([[i, i + 0.5] for i in range(size)]), op)
    found[f"reduce_scatter_{op.name}"] = x.tolist()
x = torch.empty(1, device=device)
dist.reduce_scatter(x, [of_rank([i]) for i in range(size)], dist.ReduceOp.AVG)
found["reduce_scatter"] = x.tolist()
objects: list[Any] = [None] * size
dist.all_gather_object(objects, {"rank": rank, "values": [1.5, "a", None]})
found["objects"] = objects
objects = [f"of {rank}", rank]
dist.broadcast_object_list(objects, src=last)
found["broadcast_objects"] = objects
dist.barrier()
dist.destroy_process_group()
found["is after"] = dist.is_initialized()
with open(f"{os.environ['RESULTS']}/{rank}.json", "w") as file:
    json.dump(found, file)
