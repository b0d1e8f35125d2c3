"""A stream made elsewhere, by its handle."""

import torch

owner = torch.cuda.Stream()
external = torch.cuda.ExternalStream(owner.cuda_stream)
x = torch.arange(10.0, device="cuda")
external.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(external):
    y = x.cumsum(0)
event = external.record_event()
event.synchronize()
print(y[-1].item(), external.cuda_stream == owner.cuda_stream, external.query())
