"""What conformance with torch's databases knows: families left out, absent names, differences, random results."""

from __future__ import annotations

import re

# Families that Genesis leaves out, by a pattern of the entry's name.
EXCLUDED = {
    r"^_|^torch\.|backward|^native_|^grid_sampler": "not a public name of torch",
    r"jiterator|triton_optimized": "needs CUDA in torch",
    r"[pP]ool": "pooling",
    r"interpolate|upsample|grid_sample": "interpolation",
    r"[cC]onv\w*[23]d": "2-D and 3-D convolutions",
    r"^fft\.|stft|^signal\.": "fft and signal",
    r"^special\.": "only in torch.special",
    r"ctc_loss|CTCLoss": "CTC",
    r"LBFGS": "LBFGS",
    r"functional\.unfold|pixel_|channel_shuffle": "only vision uses it",
    r"ocal_?[rR]esponse|(dropout|Dropout|Norm|Pad|Softmax)[23]d": "only vision uses it",
}

# What else is absent, and why.
ABSENT = {
    r"sparse|Sparse": "sparse tensors",
    r"^linalg\.eig": "the results are complex",
    r"^chalf$": "complex numbers of two short floats",
    r"^linalg\.ldl_": "numpy has no such factorization",
    r"^(i0|igammac?|frexp|nextafter|hash_tensor)$": "no model uses it, and it needs kernels of its own",
    r"^histogram": "histc and bincount count; edges of several dimensions are not read",
    r"^gradient$": "diff gives the differences",
    r"^nn\.LazyConv": "only LazyLinear waits for its input's size",
}

# Documented differences (docs/genesis-or-pytorch.md): patterns of the entry, of the kind and of what is found.
DIFFERENT = {
    "a gradient that does not depend on the input is not recorded": (r"", r"double backward", r"not recorded, torch"),
    "losses of short floats are float32": (r"cross_entropy", r"values", r"bfloat16 .*type float32"),
    "a number is taken where torch needs a tensor": (
        r"^(atan2|maximum|minimum|logical_\w+|ldexp|isclose)$",
        r"errors",
        r"accepted, torch raises TypeError",
    ),
    "another of equal elements is chosen": (r"^(kthvalue|mode|topk|median)$", r"", r"\d+ of \d+ values: \d+, torch"),
    "signs of eigenvectors are free": (r"^(linalg\.(eigh|svd)|svd|symeig)$", r"", r"values: "),
    "drawing has no gradient": (r"^bernoulli$", r"gradient", r"has no gradient"),
    "trigamma has no gradient": (r"^(digamma|polygamma)", r"double backward", r"trigamma has no gradient"),
    "cat takes a tensor as its rows": (r"^cat$", r"errors", r"is no TypeError"),
    "some functions take no out": (r"functional\.(linear|gelu)$|^(complex|polar)$", r"", r"takes no keyword 'out'"),
    "out and sources may have another type": (
        r"^(aminmax|gather|multinomial|scatter|scatter_add|nn\.functional\.conv1d)$",
        r"errors",
        r"accepted, torch raises RuntimeError",
    ),
    "out may be an input": (r"^(cat|take)$", r"errors", r"accepted, torch raises RuntimeError"),
    "an input that has no influence has no gradient": (r"", r"gradient", r"None and zeros"),
    "the triangle that is not read has no gradient": (
        r"^cholesky_(inverse|solve)$",
        r"gradient",
        r"values: -?0.0, torch",
    ),
    "gradients of as_strided_scatter are of the elements that stay": (r"^as_strided_scatter$", r"gradient", r"values"),
    "second derivatives are 0 where torch has NaN": (
        r"linalg\.norm/subgrad|masked\.logaddexp",
        r"double backward",
        r"values: 0.0, torch has nan",
    ),
    "polygamma is computed in float64": (r"^polygamma", r"out|in-place", r"float32"),
    "the fused loss has no second derivative": (r"linear_cross_entropy$", r"double backward", r"no second derivative"),
    "in-place functions keep the shape": (r"^addbmm$", r"in-place", r"the tensor has"),
    "least squares have no gradient": (r"lstsq", r"gradient", r"requires_grad is False"),
}

# Entries whose results are random: shapes and types are compared.
RANDOM = re.compile(
    r"^(cauchy|exponential|geometric|log_normal|normal|uniform|rand\w*|bernoulli|multinomial|nn\.functional\.\w*dropout"
    r"|nn\.functional\.rrelu|empty\w*|new_empty\w*|resize_|resize_as_|svd_lowrank|pca_lowrank)$"
)
