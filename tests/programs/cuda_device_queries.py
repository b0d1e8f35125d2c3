"""Questions about the device."""

import torch

print(torch.cuda.is_available(), torch.cuda.device_count() >= 1, torch.cuda.current_device())
print(isinstance(torch.cuda.get_device_name(0), str), len(torch.cuda.get_device_capability()))
properties = torch.cuda.get_device_properties("cuda:0")
print(properties.multi_processor_count > 0, (properties.major, properties.minor) == torch.cuda.get_device_capability(0))
print(
    torch.cuda.is_bf16_supported(),
    isinstance(torch.cuda.get_arch_list(), list),
    torch.cuda.can_device_access_peer(0, 0) in (True, False),
)
with torch.cuda.device(0):
    print(torch.zeros(1, device="cuda").device.index, torch.device("cuda", 0) == torch.device("cuda:0"))
torch.cuda.synchronize()
print(torch.cuda.is_initialized(), torch.tensor([1, 2]).cuda().get_device())
