"""Independent random streams from one seed."""

from __future__ import annotations

import hashlib


def derive(*parts: object) -> int:
    """A 63-bit seed, the hash of all parts: streams that differ in a name or number are independent.

    torch's CPU generator keeps only the low 32 bits of a seed, so it must be a hash.

    >>> derive("order", 0, 1) == derive("order", 0, 1) != derive("order", 1, 0)
    True
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
