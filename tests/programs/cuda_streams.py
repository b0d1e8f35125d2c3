"""Two streams that wait for each other, and memory that a stream still uses."""

import torch

main = torch.cuda.current_stream()
a, b = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
x = torch.arange(1_000_000, device="cuda", dtype=torch.float32)
a.wait_stream(main)
with torch.cuda.stream(a):
    y = x.sqrt()
    print(torch.cuda.current_stream() == a)
b.wait_stream(a)
with torch.cuda.stream(b):
    z = y.sum(dtype=torch.float64)
    y.record_stream(b)
del y
main.wait_stream(b)
print(round(z.item(), 2), torch.cuda.current_stream() == main, a == b, main == torch.cuda.default_stream())
a.synchronize()
print(a.query(), b.priority)
