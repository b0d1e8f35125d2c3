"""Errors: the built-in classes that they also are, and the name that a wrong one most likely means."""

import pytest

from genesis import errors


@pytest.mark.parametrize(
    "kind, bases",
    [
        (errors.ShapeError, (ValueError, RuntimeError)),
        (errors.DimensionError, (errors.ShapeError, errors.IndexRangeError)),
        (errors.DTypeError, (TypeError, NotImplementedError)),
        (errors.DeviceError, (RuntimeError,)),
        (errors.OutOfMemoryError, (MemoryError, RuntimeError)),
        (errors.IndexRangeError, (IndexError, RuntimeError)),
        (errors.KeywordError, (TypeError,)),
        (errors.GradientError, (RuntimeError,)),
        (errors.ModelError, (ValueError, RuntimeError)),
        (errors.MissingFileError, (errors.ModelError, FileNotFoundError)),
        (errors.UsageError, (ValueError, TypeError, RuntimeError)),
    ],
)
def test_errors_are_also_what_torch_raises(kind, bases):
    assert all(issubclass(kind, base) for base in (errors.GenesisError, *bases))
    assert str(kind("what", next="next")) == "what | next"


@pytest.mark.parametrize(
    "name, meant",
    [("weigth_decay", "weight_decay"), ("Lr", "lr"), ("weight-decay", "weight_decay"), ("rl", "lr"), ("quux", None)],
)
def test_the_nearest_name_is_spelled_alike(name, meant):
    assert errors.nearest(name, ["lr", "betas", "weight_decay"]) == meant


def test_the_cutoff_is_how_much_must_be_alike():
    assert errors.nearest("weighs", ["weight_decay"]) is None
    assert errors.nearest("weighs", ["weight_decay"], 0.5) == "weight_decay"


def test_an_unknown_keyword_names_the_nearest_or_all_that_there_are():
    near = errors.unknown_keyword("f", "keepdin", ["dim", "keepdim"])
    assert str(near) == "f takes no keyword 'keepdin' | did you mean keepdim?"
    assert str(errors.unknown_keyword("f", "qqq", ["dim", "keepdim"])).endswith("| it takes dim, keepdim")
    assert str(errors.unknown_keyword("f", "qqq", [])).endswith("| it takes no keywords")
