"""Philox against its published vectors, positions, and the generator's state."""

from __future__ import annotations

import random as standard

import numpy as np
import pytest

from genesis import random
from genesis.errors import UsageError
from genesis.random import Generator, philox, philox_rounds

# "kat_vectors" of the Random123 library, philox4x32 with 10 rounds: counter, key, result. The third is digits of pi.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(w, 16) for w in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_published_vectors(counter: str, key: str, result: str) -> None:
    k0, k1 = words(key)
    # two copies, so that the blocks are seen to be independent
    got = philox_rounds(tuple(np.array([w, w], np.uint64) for w in words(counter)), (k0, k1))
    assert got.dtype == np.uint32 and got.tolist() == [words(result)] * 2


def test_the_stream_is_the_rounds_of_counters_in_turn() -> None:
    assert philox(0, 0, 1).tolist() == [words(VECTORS[0][2])]
    seed, offset = 0x299F31D0A4093822, 0x85A308D3243F6A88
    counter = tuple(np.array([w], np.uint64) for w in (0x243F6A88, 0x85A308D3, 0, 0))
    assert philox(seed, offset, 1).tolist() == philox_rounds(counter, (0xA4093822, 0x299F31D0)).tolist()


def test_a_value_depends_on_its_position_only() -> None:
    whole = philox(7, 0, 100)
    assert whole.shape == (100, 4)
    assert np.array_equal(philox(7, 40, 25), whole[40:65])
    assert np.array_equal(philox(7, 2**32 - 2, 4)[2:], philox(7, 2**32, 2)), "the counter does not carry over 32 bits"
    assert len({philox(7, 0, 1).tobytes(), philox(8, 0, 1).tobytes(), philox(7 + 2**32, 0, 1).tobytes()}) == 3
    assert philox(7, 5, 0).shape == (0, 4)


def test_the_last_counters_below_two_to_the_64() -> None:
    ends = philox(2**64 - 1, 2**64 - 3, 3)
    assert np.array_equal(ends[2:], philox(2**64 - 1, 2**64 - 1, 1))


def test_bits_look_random() -> None:
    """Every bit is set about half of the time, and words in a row are not correlated."""
    bits = np.unpackbits(philox(1, 0, 20_000).view(np.uint8).reshape(-1, 4), axis=1)
    share = bits.mean(axis=0)
    assert np.abs(share - 0.5).max() < 5 * 0.5 / np.sqrt(bits.shape[0])
    unit = philox(1, 0, 20_000).reshape(-1) / 2.0**32
    assert abs(np.corrcoef(unit[:-1], unit[1:])[0, 1]) < 5 / np.sqrt(unit.size)


def test_reserve_counts_blocks_of_four_words() -> None:
    g = Generator(5)
    assert [g.reserve(n) for n in (1, 4, 5, 0, 8)] == [(5, 0), (5, 1), (5, 2), (5, 4), (5, 4)]
    assert g.state() == {"seed": 5, "offset": 6}


def test_state_comes_back() -> None:
    g = Generator(3)
    g.reserve(10)
    state = g.state()
    first = g.reserve(4)
    g.manual_seed(9)
    g.restore(state)
    assert g.reserve(4) == first
    g.manual_seed(3)
    assert g.state() == {"seed": 3, "offset": 0}


def test_seeds_outside_64_bits_are_refused() -> None:
    assert Generator(2**64 - 1).initial_seed() == 2**64 - 1
    for seed in (-(2**63) - 1, 2**64):
        with pytest.raises(UsageError, match=f"seed {seed} is not between -2"):
            Generator(seed)


def test_the_default_generator() -> None:
    before = random.get_state()
    try:
        assert random.manual_seed(11) is random.default_generator
        assert random.get_state() == {"seed": 11, "offset": 0}
        random.set_state({"seed": 12, "offset": 34})
        assert random.default_generator.reserve(1) == (12, 34)
    finally:
        random.set_state(before)


@pytest.mark.parametrize("again", [False, True])
def test_every_test_starts_at_the_same_seeds(again: bool) -> None:
    assert random.get_state() == {"seed": 0, "offset": 0}
    assert random.default_generator.reserve(8) == (0, 0)
    assert (standard.getrandbits(32), np.random.get_state()[1][0]) == (standard.Random(0).getrandbits(32), 0)
    np.random.seed(1)
