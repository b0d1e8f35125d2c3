"""Promotion, defaults, views and in-place arithmetic."""

import torch

i, f, b = torch.tensor([1, 2]), torch.tensor([0.5, 1.5]), torch.tensor([True, False])
print((i + f).dtype, (i / 2).dtype, (b + b).dtype, (i * 2.5).dtype, (i.to(torch.uint8) + i.to(torch.int8)).dtype)
print(
    torch.result_type(i, 1.0),
    torch.can_cast(torch.float32, torch.int64),
    torch.promote_types(torch.int32, torch.float16),
)
torch.set_default_dtype(torch.float64)
print(torch.tensor(1.0).dtype, torch.zeros(2).dtype, torch.get_default_dtype(), torch.arange(3.0).dtype)
torch.set_default_dtype(torch.float32)
x = torch.arange(12.0).view(3, 4)
view = x.t()[1:, ::2]
view.mul_(10)
print(x.tolist(), view.stride(), view.storage_offset(), view.is_contiguous(), view._base is not None)
print(
    x.view(-1)[5].item(),
    x.untyped_storage().data_ptr() == view.untyped_storage().data_ptr(),
    x.flatten().data_ptr() == x.data_ptr(),
)
out = torch.empty(0)
torch.add(x, 1, out=out)
print(out.shape, torch.is_tensor(out), torch.is_floating_point(i), torch.numel(x), x.nbytes, x.element_size())
print(x.clamp_(min=2).addcmul_(x, x, value=0.1).sum().item(), x.fill_(3).pow_(2).mean().item(), x.T.shape)
print(
    torch.iinfo(torch.int16).max,
    torch.finfo(torch.float16).max,
    torch.inf,
    round(torch.pi, 4),
    x.new_tensor([1, 2]).dtype,
)
z = torch.tensor([3.7, -3.7])
print(
    z.int().tolist(), z.trunc().tolist(), z.frac().tolist(), torch.fmod(z, 2).tolist(), torch.remainder(z, 2).tolist()
)
