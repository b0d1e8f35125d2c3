"""Decompositions and solvers, with a gradient through each."""

import numpy as np
import torch

rng = np.random.default_rng(24)
a = torch.from_numpy(rng.standard_normal((4, 4))).requires_grad_()
spd = a @ a.T + 4 * torch.eye(4, dtype=a.dtype)
b = torch.from_numpy(rng.standard_normal((4, 2)))
values = {
    "solve": torch.linalg.solve(spd, b).square().sum(),
    "inv": torch.linalg.inv(spd).trace(),
    "cholesky": torch.linalg.cholesky(spd).diagonal().log().sum(),
    "logdet": torch.linalg.slogdet(spd).logabsdet,
    "det": torch.linalg.det(a),
    "eigh": torch.linalg.eigvalsh(spd)[-1],
    "svd": torch.linalg.svdvals(a).sum(),
    "qr": torch.linalg.qr(a).R.abs().sum(),
    "pinv": torch.linalg.pinv(a[:, :3]).square().sum(),
    "norm": torch.linalg.norm(a, ord="fro") + torch.linalg.vector_norm(a, 3),
    "triangular": torch.linalg.solve_triangular(a.tril() + 3 * torch.eye(4, dtype=a.dtype), b, upper=False).sum(),
    "power": torch.linalg.matrix_power(a, 3).sum(),
    "multi": torch.linalg.multi_dot([a, spd, b]).sum(),
}
for name, value in values.items():
    (gradient,) = torch.autograd.grad(value, a, retain_graph=True)
    print(name, f"{value.item():.6f} {gradient.norm().item():.6f}")
u, s, vh = torch.linalg.svd(a.detach(), full_matrices=False)
w, v = torch.linalg.eigh(spd.detach())
print(
    torch.allclose(u @ torch.diag(s) @ vh, a),
    torch.allclose(v @ torch.diag(w) @ v.mT, spd),
    torch.linalg.matrix_rank(a).item(),
)
print(torch.linalg.lstsq(a.detach(), b).solution.norm().item(), torch.linalg.cond(spd).item())
