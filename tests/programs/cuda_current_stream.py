"""Set the current stream and ask whether it is capturing."""

import torch

stream = torch.cuda.Stream()
default = torch.cuda.default_stream()
torch.cuda.set_stream(stream)
print(torch.cuda.current_stream() == stream, torch.cuda.is_current_stream_capturing())
x = torch.ones(8, device="cuda") * 3
torch.cuda.set_stream(default)
default.wait_stream(stream)
print(x.sum().item(), torch.cuda.current_stream() == default, stream.cuda_stream != default.cuda_stream)
graph, seen = torch.cuda.CUDAGraph(), []
torch.cuda.synchronize()
with torch.cuda.graph(graph, stream=stream):
    seen.append(torch.cuda.is_current_stream_capturing())
    y = x + 1
graph.replay()
print(seen, y.sum().item(), torch.cuda.is_current_stream_capturing())
