"""Events: timing, order and queries."""

import torch

start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
x = torch.ones(512, 512, device="cuda")
start.record()
for _ in range(10):
    x = x @ x / 512
end.record()
end.synchronize()
print(start.elapsed_time(end) > 0, end.query(), round(x.mean().item(), 4))
stream, done = torch.cuda.Stream(), torch.cuda.Event()
with torch.cuda.stream(stream):
    y = x * 2
    done.record(stream)
torch.cuda.current_stream().wait_event(done)
stream.wait_event(end)
print((y + 1).sum().item(), done.query() or True)
