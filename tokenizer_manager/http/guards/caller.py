"""`Caller`: on whose behalf a request is made, as far as its API key tells."""

from __future__ import annotations

from typing import NamedTuple

from ...admission.scheduling_options import digest_of, tenant_of


class Caller(NamedTuple):
    """Who sent a request.

    Attributes:
        token: the bearer token; b"" for none. Checked, if the server has keys.
        owner: a digest of the key it proved to have; "" where the server asks for none. What one owner has started,
            another cannot end.
        admin: it may do what concerns everybody.
        isolated: prefixes are shared among its own requests only, and it is accounted apart from everybody else.
    """

    token: bytes = b""
    owner: str = ""
    admin: bool = True
    isolated: bool = False

    def namespace(self, cache_salt: str | None) -> str:
        """Its namespace of the prefix cache for a salt of its choice; different owners never have the same one."""
        salt = cache_salt or ""
        return f"{self.owner}:{salt}" if self.isolated else salt

    def tenant(self, user: str | None) -> str:
        """Whom to account a request to that names `user`; an isolated caller cannot name somebody else's."""
        if self.isolated and user:
            return f"key-{self.owner}/{digest_of(user.encode())}"
        return tenant_of(user, self.token)
