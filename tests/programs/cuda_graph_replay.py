"""Capture a few operations and replay them on new inputs."""

import torch

static = torch.zeros(4, device="cuda")
weight = torch.arange(16.0, device="cuda").view(4, 4) / 16
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        (static @ weight).relu()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = (static @ weight).relu() + 1
for value in (1.0, 2.0):
    static.fill_(value)
    graph.replay()
    print(out.tolist())
graph.reset()
