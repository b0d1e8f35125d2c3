"""Losses with class weights, soft targets, smoothing and reductions."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

rng = np.random.default_rng(17)
logits = torch.from_numpy(rng.standard_normal((6, 4))).requires_grad_()
target = torch.tensor([0, 3, 1, -100, 2, 2])
weight = torch.tensor([0.5, 1.0, 2.0, 1.5], dtype=torch.float64)
soft = torch.from_numpy(rng.dirichlet(np.ones(4), 6))
values = torch.from_numpy(rng.standard_normal((6, 4)))
losses = [
    F.cross_entropy(logits, target, weight=weight, label_smoothing=0.1),
    F.cross_entropy(logits, soft, weight=weight, label_smoothing=0.2, reduction="sum"),
    nn.NLLLoss(weight, ignore_index=-100)(F.log_softmax(logits, 1), target),
    F.kl_div(F.log_softmax(logits, 1), soft, reduction="batchmean"),
    nn.SmoothL1Loss(beta=0.5)(logits, values),
    nn.HuberLoss(delta=0.7, reduction="sum")(logits, values),
    F.l1_loss(logits, values),
    F.binary_cross_entropy_with_logits(logits, soft, pos_weight=weight),
    nn.MarginRankingLoss(margin=0.3)(logits[:, 0], logits[:, 1], values[:, 0].sign()),
    F.cosine_embedding_loss(logits, values, values[:, 0].sign(), margin=0.1),
    nn.TripletMarginLoss(margin=1.0, p=2)(logits, values, values.flip(0)),
    F.gaussian_nll_loss(logits, values, soft + 0.1),
    F.poisson_nll_loss(logits, soft, log_input=True),
    F.multi_margin_loss(logits, target.clamp(min=0)),
    F.hinge_embedding_loss(logits, values.sign()),
    F.soft_margin_loss(logits, values.sign()),
]
for loss in losses:
    (gradient,) = torch.autograd.grad(loss, logits)
    print(f"{loss.item():.6f} {gradient.norm().item():.6f}")
print(F.cross_entropy(logits, target, reduction="none").shape)
