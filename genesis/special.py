"""Names of torch.special: functions of `genesis`.

>>> genesis.special.expit(genesis.tensor(0.0))
tensor(0.5000)
"""

from genesis.functions.surface import functions as _functions

_SAME = (
    "digamma", "erf", "erfc", "erfinv", "exp2", "expm1", "log1p", "log_softmax", "logit", "logsumexp", "round", "sinc",
    "softmax", "xlogy",
)  # fmt: skip
_NAMES = {name: name for name in _SAME} | {
    "expit": "sigmoid",
    "gammaln": "lgamma",
    "multigammaln": "mvlgamma",
    "psi": "digamma",
}

globals().update({name: _functions[own] for name, own in _NAMES.items()})

__all__ = list(_NAMES)
