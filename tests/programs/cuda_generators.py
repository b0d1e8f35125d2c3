"""Seeds and states of the device's generator."""

import torch

torch.cuda.manual_seed_all(5)
a = torch.rand(8, device="cuda")
state = torch.cuda.get_rng_state()
b = torch.rand(8, device="cuda")
torch.cuda.set_rng_state(state)
print(torch.equal(b, torch.rand(8, device="cuda")), torch.equal(a, b))
torch.manual_seed(5)
print(torch.equal(a, torch.rand(8, device="cuda")), torch.cuda.initial_seed())
generator = torch.Generator(device="cuda").manual_seed(1)
c = torch.randn(4, device="cuda", generator=generator)
generator.manual_seed(1)
print(torch.equal(c, torch.randn(4, device="cuda", generator=generator)), generator.initial_seed())
