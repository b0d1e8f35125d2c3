"""An allocation that cannot fit, caught, and work after it."""

import torch

try:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    print("caught", isinstance(error, RuntimeError), "memory" in str(error))
try:
    torch.zeros(3, device="cuda") + torch.zeros(3)
except RuntimeError as error:
    print("refused", "cuda" in str(error))
x = torch.ones(1000, device="cuda")
print(x.sum().item(), x.device, x.is_cuda, x.cpu().device)
