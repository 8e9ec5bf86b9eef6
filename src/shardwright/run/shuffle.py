"""The order of an epoch without a table: a keyed permutation that is worked out an index at a time.

A Feistel network permutes the smallest power of two that holds all indices; an index that it sends beyond
the last is sent on until it lands within (cycle walking). Nothing is held, whereas a table takes 8 B an
index: 8 GB on every rank for 10^9 windows. Not cryptography: an order without a visible pattern is enough.

Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", method of cycle walking.
"""

import hashlib

WORD = (1 << 64) - 1


def shuffled(index: int, count: int, seed: int, epoch: int) -> int:
    """Where ``index`` of ``range(count)`` goes in the order of (seed, epoch): for each of these a bijection.

    Takes less than two turns of the network on average, because its domain is less than twice ``count``.
    """
    keys = _round_keys(seed, epoch)
    bits = max((count - 1).bit_length(), 2)
    while True:
        index = _permuted(index, bits, keys)
        if index < count:
            return index


def _permuted(value: int, bits: int, keys: list[int]) -> int:
    """A bijection of ``bits``-bit numbers: each half in turn is mixed into the other, which can be undone."""
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    high, low = value >> low_bits, value & low_mask
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        high ^= _mixed(low + even) & high_mask
        low ^= _mixed(high + odd) & low_mask
    return high << low_bits | low


def _round_keys(seed: int, epoch: int) -> list[int]:
    """Eight words, one a round."""
    words = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=64).digest()
    return [int.from_bytes(words[i : i + 8], "little") for i in range(0, 64, 8)]


def _mixed(value: int) -> int:
    """A word of which every bit depends on every bit of ``value``.

    Source: the finaliser of SplitMix64, Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators", variant 13 of Stafford.
    """
    value = (value ^ (value & WORD) >> 30) * 0xBF58476D1CE4E5B9 & WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & WORD
    return value ^ value >> 31
