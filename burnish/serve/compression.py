"""Compressed bodies of requests (RFC 9110), decompressed up to a limit."""

from __future__ import annotations

import zlib

from burnish.errors import BurnishError

COMPRESSED = ("gzip", "x-gzip", "deflate")
"""Values of Content-Encoding that :func:`decompressed` reads."""


class CompressionError(BurnishError, ValueError):
    """Compressed data that is not well-formed."""


def decompressed(data: bytes, limit: int) -> bytes:
    """Return the content of gzip or zlib data, at most ``limit`` + 1 bytes of it. Raises
    CompressionError."""
    reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # either format
    try:
        content = reader.decompress(data, limit + 1)
    except zlib.error as error:
        raise CompressionError(str(error)) from error
    if len(content) <= limit and not reader.eof:
        raise CompressionError("the compressed data ends too early")
    if reader.unused_data:
        raise CompressionError("there is data after the end of the compressed data")
    return content
