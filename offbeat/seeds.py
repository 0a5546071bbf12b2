"""Independent random streams from one seed."""

from __future__ import annotations

import hashlib


def derive(*parts: object) -> int:
    """A 63-bit seed hashed from all of its parts, so that streams with other names or numbers share nothing.

    torch's CPU generator keeps only the low 32 bits of a seed, so nothing but a hash may be handed to it.

    >>> derive("order", 0, 1) == derive("order", 0, 1) != derive("order", 1, 0)
    True
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
