"""The secret of a job: what its ranks know, and nobody else who reaches their ports.

    AXO_SECRET=word                       of a launcher that keeps its environment to itself
    AXO_SECRET_FILE=job.secret            a file that only its owner may read

Ranks that have one prove it to each other, in what they leave in the store and on each connection. Ranks of one host
that meet through their launcher need none.
"""

from __future__ import annotations

import hmac
import os
import stat
import warnings

from axo import files, settings

_LEAST = 16  # characters
_MOST = 4096
_SEAL = "sealed "
_PROOF = 32  # hexadecimal digits of a text's proof


class Stranger(Exception):
    """What stands in the store was not left by a rank that has this rank's secret."""


def of_job() -> bytes:
    """The secret; empty where there is none.

    Raises:
        ValueError: It is too short, or the file may be read by others or cannot be read.
    """
    text, path = settings.value_of("AXO_SECRET"), settings.value_of("AXO_SECRET_FILE")
    if not text and not path:
        return b""
    source = "AXO_SECRET" if text else f"AXO_SECRET_FILE={path}"
    if not text:
        try:
            with files.open_regular(path) as file:
                mode = os.fstat(file.fileno())
                if mode.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or mode.st_uid != os.geteuid():
                    raise ValueError(f"{source} may be read or changed by others; chmod 600 {path}, as its owner")
                text = file.read(_MOST + 1).decode(errors="surrogateescape").strip()
        except OSError as error:
            raise ValueError(f"{source} cannot be read: {error.strerror}") from None
    if not _LEAST <= len(text) <= _MOST:
        raise ValueError(f"{source} has {len(text)} characters, and a secret has {_LEAST} to {_MOST}; make one with"
                         " python -c 'import secrets; print(secrets.token_hex())'")  # fmt: skip
    return text.encode(errors="surrogateescape")


def check_several_hosts(*, warns: bool) -> None:
    """What a job without a secret is told where its ranks are on several hosts: a warning, by one of its ranks.

    Raises:
        ValueError: ``AXO_REQUIRE_SECRET=1`` and there is none.
    """
    if of_job():
        return
    remedy = "give every rank the same AXO_SECRET, or AXO_SECRET_FILE"
    if settings.is_on("AXO_REQUIRE_SECRET"):
        raise ValueError(f"AXO_REQUIRE_SECRET=1, and this job has no secret; {remedy}")
    if not warns:
        return
    warnings.warn(
        f"this job spans several hosts and has no secret: whoever reaches its ports may take a rank's place; {remedy}",
        stacklevel=2,
    )


def sealed(text: str, place: str) -> str:
    """``text`` as a rank of this job leaves it at ``place`` in a store: with a proof, where there is a secret."""
    secret = of_job()
    return f"{_SEAL}{_proof(secret, text, place)}{text}" if secret else text


def opened(data: bytes, place: str) -> str:
    """The text of what a rank of this job has left at ``place``.

    Raises:
        Stranger: Its proof is missing or wrong, or this rank has no secret and that one has.
    """
    text, secret = data.decode(errors="replace"), of_job()
    if not secret and not text.startswith(_SEAL):
        return text
    proof, inner = text[len(_SEAL) :][:_PROOF], text[len(_SEAL) + _PROOF :]
    if not secret or not hmac.compare_digest(proof.encode(), _proof(secret, inner, place).encode()):
        raise Stranger
    return inner


def _proof(secret: bytes, text: str, place: str) -> str:
    return hmac.digest(secret, f"{place}\n{text}".encode(), "sha256").hex()[:_PROOF]
