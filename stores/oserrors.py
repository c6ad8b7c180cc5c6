"""What an error of the operating system means for a store."""

from __future__ import annotations

import errno

from stepwell.errors import NoSpaceError, PermanentStoreError, StoreError, TransientStoreError

__all__ = ["store_error"]

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})

# Another try may succeed: the device or the network had a fault, or something was busy. EIO is
# here because a retry writes all bytes again (it never repeats a failed fsync on the same file).
_TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.EMFILE,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOENT,  # while writing: a directory or a temporary file was taken away under us
        errno.ENOLCK,
        errno.ENOMEM,
        errno.ENOTCONN,
        errno.EPIPE,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ETXTBSY,
    }
)


def store_error(error: OSError, what: str, *, where: str, size_bytes: int | None = None) -> StoreError:
    """Translate `error` into the class that says how to react to it.

    Parameters
    ----------
    error : OSError
        Use the result as ``raise store_error(error, ...) from error``.
    what : str
        What was tried, ``"put 'key'"``.
    where : str
        URL or path of the store.
    size_bytes : int, optional
        How many bytes were to be stored.
    """
    reason = f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no errno')})"
    size = "" if size_bytes is None else f" of {size_bytes} bytes"
    text = f"cannot {what}{size} in {where}: {reason}"
    if error.errno in _NO_SPACE:
        return NoSpaceError(f"{text}; free some space there or use another directory")
    if error.errno in _TRANSIENT:
        return TransientStoreError(f"{text}; worth another try")
    return PermanentStoreError(f"{text}; check the directory and its permissions")
