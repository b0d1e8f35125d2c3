"""NVTX ranges around steps of training."""

import torch

w = torch.ones(4, device="cuda", requires_grad=True)
for step in range(2):
    torch.cuda.nvtx.range_push(f"step {step}")
    with torch.cuda.nvtx.range("forward"):
        loss = (w * (step + 1)).pow(2).sum()
    loss.backward()
    torch.cuda.nvtx.mark("backward done")
    torch.cuda.nvtx.range_pop()
print(w.grad.tolist())
